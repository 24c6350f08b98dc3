"""A trainer as its supervisor sees it: messages, output, stacks, and how it ends."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any, Protocol

from hpo.evaluation.template_client import TemplateClient
from hpo.evaluation.trainer_output import OutputPipe, TrainerOutput
from hpo.layout import list_usable_cores
from hpo.process.channel import ChannelClosed, Message
from hpo.process.failure import describe_status
from hpo.process.launcher import make_plain_environment
from hpo.process.linux import count_memory_kills
from hpo.process.stacks import INTERRUPT, WRITE_STACKS, find_frames

_SECONDS_TO_WRITE_STACKS = 0.5
_MAX_SECONDS_TO_EXIT = 15.0  # of a process that is killed; the driver of a GPU may keep it
_POLL_SECONDS = 0.01
COLLECTIVES_PATH = "/torch/distributed/"  # in the paths of frames


class Waker(Protocol):
    """Something that another thread can end a wait with."""

    def fileno(self) -> int:
        """Return the descriptor to wait for."""


@dataclass(frozen=True)
class TrainerEnd:
    """The end of a trainer: a description, the frames of its objective, and the exit status if it is known."""

    text: str
    frames: Sequence[FrameSummary] = ()
    status: int | None = None


@dataclass(frozen=True)
class TrainerOptions:
    """What a rank's trainers have in common: threads of torch, the level of logs, and whether a terminal is theirs."""

    threads: int = 1
    log_level: str = "WARNING"
    is_attended: bool = False


class TrainerClient:
    """A process that was forked from the template for this rank."""

    def __init__(
        self,
        template: TemplateClient,
        output: TrainerOutput,
        terms: TrainerOptions,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Fork a trainer. It is to train if there are `variables` for its environment, of which there may be none."""
        self._template = template
        self._output = output
        self._pipes = [] if terms.is_attended else [OutputPipe(output, False), OutputPipe(output, True)]
        self._stack_file = os.memfd_create("hpo-stacks")
        self._memory_kill_count = count_memory_kills()
        self._template_crash_count = template.crash_count
        self.is_killed = self._has_started = False
        self._killed_at = math.inf
        ends = [0, 1, 2] if terms.is_attended else [pipe.write_end for pipe in self._pipes]
        streams = [*ends[-2:], self._stack_file, *ends[:-2]]
        self.process, self._channel = template.spawn(
            streams,
            environment={**make_plain_environment(), **(variables or {})},
            trains=variables is not None,
            cores=list_usable_cores(),
            folder=os.getcwd(),  # noqa: PTH109 - a text
            threads=terms.threads,
            log_level=terms.log_level,
            is_attended=terms.is_attended,
        )
        for pipe in self._pipes:
            pipe.close_write_end()

    def send(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        """Send a request; a trainer that has ended is found by `wait`."""
        with suppress(ChannelClosed):
            self._channel.send(kind, descriptors, **content)

    def wait(self, timeout: float | None = None, *others: Waker) -> Message | TrainerEnd | None:
        """Return the trainer's next message, or its end; None after `timeout` seconds, or if another one is ready."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if (message := self._channel.receive(0)) is not None:
                    self.read_lines()
                    if message.kind != "started":
                        return message
                    self._has_started = True
                    continue
            except ChannelClosed as error:
                return self._describe_end(str(error))
            if self._template.has_ended(self.process) or time.monotonic() > self._killed_at + _MAX_SECONDS_TO_EXIT:
                return self._describe_end("")
            left = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            pipes = [pipe for pipe in self._pipes if pipe.is_open]
            waiting: list[Any] = [self._channel, *pipes, *others, *self._find_open_templates()]
            ready = select.select(waiting, [], [], left)[0]
            for pipe in pipes:
                if pipe in ready:
                    pipe.read()
            if self._template in ready:
                self._template.read_messages()
            if not ready or any(other in ready for other in others):
                return None

    def ask(self, kind: str, answer: str, descriptors: Sequence[int] = (), /, **content: Any) -> Message | TrainerEnd:
        """Send a request, and return the answer, or the trainer's end."""
        self.send(kind, descriptors, **content)
        return self.wait_for_kind(answer)

    def write_checkpoint(self, path: str) -> Mapping[str, Any]:
        """Let the trainer write the last state that it has copied; return after how many losses, or an error."""
        answer = self.ask("write_state", "written", path=path)
        return {"error": answer.text, "losses": 0, "seconds": 0.0} if isinstance(answer, TrainerEnd) else answer.content

    def write_weights(self, path: str, about: Mapping[str, str]) -> str:
        """Let the trainer write the weights of the lowest loss, with texts about them; return an error, or ""."""
        answer = self.ask("write_weights", "written", path=path, about=about)
        return answer.text if isinstance(answer, TrainerEnd) else str(answer["error"])

    def wait_for_kind(self, kind: str) -> Message | TrainerEnd:
        """Return the trainer's next message of a kind, or its end."""
        while True:
            found = self.wait(None)
            if isinstance(found, TrainerEnd) or (found is not None and found.kind == kind):
                return found

    def interrupt(self) -> None:
        """Let the objective be ended by an exception."""
        self._send_signal(INTERRUPT)

    def find_stack(self) -> Sequence[FrameSummary]:
        """Return the frames of the objective in the trainer's main thread, as far as it can say them."""
        if not self._has_started:  # the signal would end it
            return ()
        start = os.fstat(self._stack_file).st_size
        self._send_signal(WRITE_STACKS)
        give_up_at, size = time.monotonic() + _SECONDS_TO_WRITE_STACKS, start
        while time.monotonic() < give_up_at:
            time.sleep(_POLL_SECONDS)
            before, size = size, os.fstat(self._stack_file).st_size
            if start < size == before:
                break
        return self._read_frames(start)

    def count_cpu_ticks(self) -> int:
        """Return the CPU time of the trainer's main thread, in hundredths of a second on most systems."""
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{self.process}/task/{self.process}/stat").read_text()
            return sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        return 0

    def kill(self) -> None:
        """End the process at once."""
        if not self.is_killed:
            self.is_killed, self._killed_at = True, time.monotonic()
        self._send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let the process go, at once if it is to be killed; read what it has printed."""
        self._channel.close()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        if self._stack_file >= 0:
            os.close(self._stack_file)
            self._stack_file = -1

    def read_output(self) -> None:
        """Take in what was printed so far, lines without an end too."""
        self.read_lines()
        for pipe in self._pipes:
            pipe.end_line()

    @property
    def has_lost_template(self) -> bool:
        """Whether the template has died, which ends all its trainers."""
        self._template.read_messages()
        return not self._template.is_open or self._template.crash_count > self._template_crash_count

    def _find_open_templates(self) -> list[TemplateClient]:
        return [self._template] if self._template.is_open else []

    def read_lines(self) -> None:
        """Take in the whole lines that were printed so far."""
        for pipe in self._pipes:
            pipe.read()

    def _send_signal(self, number: int) -> None:
        if not self._template.has_ended(self.process):
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

    def _describe_end(self, closed: str) -> TrainerEnd:
        """Return how the trainer has ended; one that has only closed its connection is killed."""
        status = self._template.wait_for_status(self.process)
        if status is None:
            self.kill()
            self._template.wait_for_status(self.process)
        self.read_lines()
        frames = self._read_frames(0)
        if status is None and not self.is_killed:
            return TrainerEnd(f"the trainer has closed its connection ({closed})", frames)
        what = f"the trainer {describe_status(status)}"
        if status == -signal.SIGKILL and not self.is_killed:
            sure = count_memory_kills() > self._memory_kill_count
            what += ", by the kernel for want of memory" if sure else ", perhaps by the kernel for want of memory"
        elif status == -signal.SIGABRT and any(COLLECTIVES_PATH in frame.filename for frame in frames):
            what += (
                ", most likely because the ranks of its worker were in collectives of different sizes, or in different "
                "numbers of them (hpo check compares them)"
            )
        elif status is not None and status >= 0:
            what += ": return, or raise an exception" if status == 0 else ""
        return TrainerEnd(what + self.describe_last_error(), frames, status)

    def describe_last_error(self) -> str:
        """Return the last line on standard error, as the end of a sentence; empty without one."""
        errors = [line for line in self._output.last_errors if not line.startswith("Fatal Python error")]
        return f"; its last line on stderr: {errors[-1].strip()}" if errors else ""

    def _read_frames(self, start: int) -> Sequence[FrameSummary]:
        size = os.fstat(self._stack_file).st_size
        header = os.pread(self._stack_file, 100, 0).decode(errors="replace").partition("\n")[0]
        dump = os.pread(self._stack_file, size - start, start).decode(errors="replace")
        return find_frames(header, dump)


class TrainerSlot:
    """The place of this rank's trainer: one at a time, forked when it is needed.

    Trainers are replaced after each evaluation if they are to be `fresh`.
    """

    def __init__(
        self, template: TemplateClient, output: TrainerOutput, terms: TrainerOptions, fresh: bool = False
    ) -> None:
        self._template = template
        self.output = output
        self._terms = terms
        self._is_fresh = fresh
        self.variables: dict[str, str] = {}
        self._trainer: TrainerClient | None = None
        self.group_name = ""  # that the trainer is in, by name

    @property
    def is_ready(self) -> bool:
        """Whether there is a trainer that lives, as far as is known."""
        if self._trainer is None:
            return False
        self._template.read_messages()
        return not self._template.has_ended(self._trainer.process)

    @property
    def trainer(self) -> TrainerClient:
        """The trainer; one is forked if there is none that lives."""
        if not self.is_ready:
            self.discard_trainer()
            self._trainer = TrainerClient(self._template, self.output, self._terms, self.variables)
        assert self._trainer is not None
        return self._trainer

    def fork_ahead(self) -> None:
        """Fork the trainer now, so that the first evaluation does not wait for it."""
        assert self.trainer

    def fork_other(self, output: TrainerOutput | None = None) -> TrainerClient:
        """Return another trainer, which belongs to the caller, and what it prints to an output of its own."""
        return TrainerClient(self._template, output or TrainerOutput(), replace(self._terms, is_attended=False))

    def finish_evaluation(self, is_clean: bool) -> None:
        """End an evaluation: a trainer in which something is left, or which is not to be used again, is let go."""
        if self._trainer is not None and (self._is_fresh or not is_clean):
            trainer, self._trainer, self.group_name = self._trainer, None, ""
            trainer.close()

    def discard_trainer(self) -> None:
        """Kill the trainer, if there is one."""
        trainer, self._trainer, self.group_name = self._trainer, None, ""
        if trainer is not None:
            trainer.kill()
            trainer.close()
