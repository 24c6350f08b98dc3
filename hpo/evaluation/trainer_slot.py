"""The trainer of a rank: when it is forked, reused and replaced."""

from __future__ import annotations

from dataclasses import replace

from hpo.evaluation.template_client import TemplateClient
from hpo.evaluation.trainer_client import TrainerClient, TrainerOptions
from hpo.evaluation.trainer_output import TrainerOutput
from hpo.process.standard_streams import warn


class TrainerSlot:
    """Holds the trainer of this rank. There is at most one, and it is forked when it is needed.

    Args:
        output: Takes the lines that trainers print.
        fresh: Whether each evaluation gets a new trainer.
    """

    def __init__(
        self, template: TemplateClient, output: TrainerOutput, options: TrainerOptions, fresh: bool = False
    ) -> None:
        self._template = template
        self.output = output
        self._options = options
        self._is_fresh = fresh
        self.variables: dict[str, str] = {}
        self._trainer: TrainerClient | None = None
        self._ending: TrainerClient | None = None  # It was closed or killed, and may still hold memory of a GPU.
        self.group_name = ""  # name of the process group that the trainer is in
        self.first_free_memory = 0  # bytes of the GPU when the first evaluation began
        self._has_warned = False

    @property
    def is_ready(self) -> bool:
        """Whether a trainer is running, as far as this rank knows."""
        if self._trainer is None:
            return False
        self._template.read_messages()
        return not self._template.has_ended(self._trainer.process)

    @property
    def trainer(self) -> TrainerClient:
        """The running trainer. If none is running, a new one is forked, after the last one has ended."""
        if not self.is_ready:
            self.discard_trainer()
            self._wait_for_exit()
            self._trainer = TrainerClient(self._template, self.output, self._options, self.variables)
        assert self._trainer is not None
        return self._trainer

    def fork_ahead(self) -> None:
        """Fork the trainer now, so that the first evaluation need not wait for it."""
        assert self.trainer

    def fork_other(self, output: TrainerOutput | None = None) -> TrainerClient:
        """Fork an additional trainer for the caller, which must end it. Its lines go to `output`, if that is given."""
        return TrainerClient(self._template, output or TrainerOutput(), replace(self._options, is_attended=False))

    def finish_evaluation(self, is_clean: bool) -> None:
        """Close the trainer after an evaluation, unless it can be reused.

        Args:
            is_clean: Whether the evaluation has left the trainer in a state that allows another evaluation.
        """
        if self._is_fresh or not is_clean:
            self._close_trainer()

    def discard_trainer(self) -> None:
        """Kill the trainer, if there is one."""
        if self._trainer is not None:
            self._trainer.kill()
        self._close_trainer()

    def end_trainer(self) -> None:
        """Kill the trainer, if there is one, and wait until it has ended."""
        self.discard_trainer()
        if self._ending is not None:
            self._ending.kill()
        self._wait_for_exit()

    def warn_once(self, text: str) -> None:
        """Print the first warning about the memory of this rank's GPU."""
        if not self._has_warned:
            self._has_warned = True
            warn(f"warning: {text}")

    def _wait_for_exit(self) -> None:
        """Wait until the trainer that was closed or killed last has ended, and has freed the memory of its GPU."""
        if self._ending is not None:
            self._ending.wait_for_exit()
            self._ending = None

    def _close_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer, self._ending = None, self._trainer
        self.group_name = ""
