"""The trainer of a rank: when it is forked, used again, and replaced."""

from __future__ import annotations

from dataclasses import replace

from hpo.evaluation.template_client import TemplateClient
from hpo.evaluation.trainer_client import TrainerClient, TrainerOptions
from hpo.evaluation.trainer_output import TrainerOutput


class TrainerSlot:
    """Holds the trainer of this rank: one at a time, forked when it is needed.

    Args:
        template: The template.
        output: Takes the lines that trainers print.
        options: Options of the trainers.
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
        self.group_name = ""  # name of the process group that the trainer is in

    @property
    def is_ready(self) -> bool:
        """Whether a trainer is running, as far as this rank knows."""
        if self._trainer is None:
            return False
        self._template.read_messages()
        return not self._template.has_ended(self._trainer.process)

    @property
    def trainer(self) -> TrainerClient:
        """The trainer, which is forked if none is running."""
        if not self.is_ready:
            self.discard_trainer()
            self._trainer = TrainerClient(self._template, self.output, self._options, self.variables)
        assert self._trainer is not None
        return self._trainer

    def fork_ahead(self) -> None:
        """Fork the trainer now, so that the first evaluation need not wait for it."""
        assert self.trainer

    def fork_other(self, output: TrainerOutput | None = None) -> TrainerClient:
        """Fork another trainer for the caller, with an output of its own."""
        return TrainerClient(self._template, output or TrainerOutput(), replace(self._options, is_attended=False))

    def finish_evaluation(self, is_clean: bool) -> None:
        """End an evaluation; release the trainer unless it is clean and may be used again."""
        if self._trainer is not None and (self._is_fresh or not is_clean):
            trainer, self._trainer, self.group_name = self._trainer, None, ""
            trainer.close()

    def discard_trainer(self) -> None:
        """Kill the trainer, if there is one."""
        trainer, self._trainer, self.group_name = self._trainer, None, ""
        if trainer is not None:
            trainer.kill()
            trainer.close()
