"""A trainer as its rank sees it: messages, printed lines, stacks and end.

It runs evaluations, or calls functions of the user: the constraints and `test`.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import TYPE_CHECKING, Any, TextIO

from hpo.errors import RunError
from hpo.evaluation.template_client import TemplateClient
from hpo.evaluation_api import NOTE_PATTERN
from hpo.layout import list_usable_cores
from hpo.process.channel import ChannelClosed, Message
from hpo.process.failure import describe_status
from hpo.process.launcher import make_plain_environment
from hpo.process.linux import count_memory_kills, read_stat_fields
from hpo.process.standard_streams import warn
from hpo.process.user_frames import COLLECTIVES_PATH, INTERRUPT, find_frames

if TYPE_CHECKING:
    from _typeshed import HasFileno

    from hpo.evaluation.report_reader import ReportReader

_SECONDS_TO_WRITE_STACKS = 0.5
_MAX_SECONDS_TO_EXIT = 15.0  # for a killed process, which the driver of a GPU may keep
_POLL_SECONDS = 0.01
_SECONDS_TO_ANSWER = 600.0  # enough for the thousands of draws that check the constraints

# The number of characters that are kept, per rank and step: the last ones. Longer lines are cut.
_MAX_CHARACTERS = 64 * 1024
_MAX_READ_BYTES = 1 << 16
_LAST_ERROR_LINES = 20  # lines on standard error that are kept for the failure of a crashed trainer
_TERMINATED = "terminate called without an active exception"  # std::terminate of libstdc++
_EXCEPTION_LINE = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TRACEBACK = "Traceback (most recent call last)"


@dataclass
class TrainerOutput:
    """Lines of one rank's trainers, labelled `worker 1 rank 0 |`.

    If a program redraws a line, such as a progress bar, only the final version is shown.
    """

    label: str = ""
    """Worker and rank of the next lines."""
    rank: int = 0
    last_errors: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_ERROR_LINES))
    """The latest lines on standard error."""
    listener: ReportReader | None = None
    """Receives the lines of a program, and its notes, which precede the next line (see
    `hpo.evaluation_api`). None unless a program runs."""
    _lines: deque[str] = field(default_factory=deque)
    _character_count: int = 0
    _dropped_lines: int = 0
    _has_traceback: bool = False

    def forget_errors(self) -> None:
        """Forget the latest lines on standard error; call it before another evaluation begins."""
        self.last_errors.clear()
        self._has_traceback = False

    @property
    def shows_harmless_abort(self) -> bool:
        """Whether native code has terminated the process without an exception in C++ or Python.

        Threads of torch sometimes cause such an abort while a process exits. After a Python
        traceback the value is false, since the exception is then the failure to report.
        """
        return not self._has_traceback and any(_TERMINATED in line for line in self.last_errors)

    def add_lines(self, lines: list[bytes], stream: str, is_whole: bool = True) -> None:
        """Show lines with their label, and keep them for `take_printed`.

        `is_whole` is false for parts of a line that is too long.
        """
        texts = [line.decode(errors="replace") for line in lines]
        shown = [text.rstrip("\r").rpartition("\r")[2] for text in texts]
        if stream == "stderr":
            self.last_errors.extend(line for line in shown if line.strip())
            # Torch puts [rank0]: in front.
            self._has_traceback |= any(_TRACEBACK in line for line in shown)
        if self.listener is not None:
            for line in shown:
                self.listener.take_line(line if is_whole else None, stream)
        for line in shown if self.label else ():
            self._lines.append(line[-_MAX_CHARACTERS:])
            self._character_count += len(self._lines[-1])
            while self._character_count > _MAX_CHARACTERS and len(self._lines) > 1:
                self._character_count -= len(self._lines.popleft())
                self._dropped_lines += 1
        label = f"{self.label} | " if self.label else ""
        with suppress(OSError, ValueError):  # The search continues if its output cannot be written.
            file: TextIO | None = sys.stderr if stream == "stderr" else sys.stdout
            if file is not None:
                file.write("".join(f"{label}{line}\n" for line in shown))
                file.flush()

    def take_printed(self) -> str:
        """Return the lines since the previous call, labelled with the rank."""
        lines = list(self._lines)
        if self._dropped_lines:
            lines.insert(0, f"({self._dropped_lines} earlier lines are not kept)")
        self._lines.clear()
        self._character_count = 0
        self._dropped_lines = 0
        return "".join(f"rank {self.rank} | {line}\n" for line in lines)


class OutputPipe:
    """The reading end of a pipe for a trainer's standard output or standard error."""

    def __init__(self, output: TrainerOutput, stream: str) -> None:
        self._output = output
        self._stream = stream
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._partial_line = b""
        self._is_cut = False  # Whether a part of the current line was passed on.
        self.is_open = True

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        return self._read_end

    def read(self) -> None:
        """Read the available output without waiting."""
        while self.is_open:
            try:
                data = os.read(self._read_end, _MAX_READ_BYTES)
            except BlockingIOError:
                return
            self.is_open = bool(data)
            text, *notes_and_texts = NOTE_PATTERN.split(self._partial_line + data)
            self._take_lines(text)
            for note, text in zip(notes_and_texts[::2], notes_and_texts[1::2], strict=True):
                if self._output.listener is not None:
                    name, _, value = note.decode(errors="replace").partition(" ")
                    self._output.listener.take_note(name, value, self._stream)
                self._take_lines(self._partial_line + text)

    def _take_lines(self, text: bytes) -> None:
        """Pass on the complete lines of a text, and keep an incomplete last line."""
        *lines, rest = text.split(b"\n")
        # A carriage return overwrites the text before.
        self._partial_line = rest[rest[:-1].rfind(b"\r") + 1 :]
        if lines and self._is_cut:
            self._output.add_lines([lines.pop(0)], self._stream, is_whole=False)
            self._is_cut = False
        if lines:
            self._output.add_lines(lines, self._stream)
        if len(self._partial_line) > _MAX_CHARACTERS:
            self._is_cut = True
            self.end_line()

    def end_line(self) -> None:
        """Pass on an incomplete line, because it is too long or no more output is expected."""
        if line := self._partial_line:
            self._partial_line = b""
            self._output.add_lines([line], self._stream, is_whole=not self._is_cut)

    def close(self) -> None:
        """Read the remaining output, and close the pipe."""
        self.read()
        self.end_line()
        os.close(self._read_end)


@dataclass(frozen=True)
class TrainerEnd:
    """The end of a trainer."""

    text: str
    """Description of how it has ended."""
    frames: Sequence[FrameSummary] = ()
    """Stack of its objective; empty if it is not known."""
    status: int | None = None
    """Exit status, negative for a signal; None if it is not known."""


@dataclass(frozen=True)
class TrainerOptions:
    """Options of all trainers of a rank."""

    threads: int = 1
    """Number of threads that torch uses."""
    log_level: str = "WARNING"


class TrainerClient:
    """A trainer, forked for this rank from the template.

    Args:
        variables: Additional environment variables if the trainer runs evaluations. None if it has
            another task.
        is_attended: Whether the trainer uses the terminal of this rank. Its output is not read.
    """

    def __init__(
        self,
        template: TemplateClient,
        output: TrainerOutput,
        options: TrainerOptions,
        variables: Mapping[str, str] | None = None,
        is_attended: bool = False,
    ) -> None:
        self._template = template
        self._output = output
        streams = () if is_attended else ("stdout", "stderr")
        self._pipes = [OutputPipe(output, stream) for stream in streams]
        self._stack_file = os.memfd_create("hpo-stacks")
        stack_requests, self._stack_requests = os.pipe()
        self._memory_kill_count = count_memory_kills()
        self._template_crash_count = template.crash_count
        self.has_started = False
        self._killed_at = math.inf
        ends = [0, 1, 2] if is_attended else [pipe.write_end for pipe in self._pipes]
        self.process, self._channel = template.spawn(
            [*ends[-2:], self._stack_file, stack_requests, *ends[:-2]],
            environment={**make_plain_environment(), **(variables or {})},
            trains=variables is not None,
            cores=list_usable_cores(),
            folder=os.getcwd(),  # noqa: PTH109 - a text
            threads=options.threads,
            log_level=options.log_level,
            is_attended=is_attended,
        )
        os.close(stack_requests)
        for pipe in self._pipes:
            os.close(pipe.write_end)

    def send(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        """Send a request. If the trainer has ended, it is lost, and `wait` returns the end."""
        with suppress(ChannelClosed):
            self._channel.send(kind, descriptors, **content)

    def wait(self, timeout: float | None = None, *others: HasFileno) -> Message | TrainerEnd | None:
        """Wait for the trainer's next message, or for its end, and return it.

        Return None after `timeout` seconds, or if one of `others` has become ready.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if (message := self._channel.receive(0)) is not None:
                    self.read_lines()
                    if message.kind != "started":
                        return message
                    self.has_started = True
                    continue
            except ChannelClosed as error:
                return self._describe_end(str(error))
            is_stuck = time.monotonic() > self._killed_at + _MAX_SECONDS_TO_EXIT
            if is_stuck or self._template.has_ended(self.process):
                return self._describe_end("")
            left = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            pipes = [pipe for pipe in self._pipes if pipe.is_open]
            templates = [self._template] if self._template.is_open else []
            waiting: list[Any] = [self._channel, *pipes, *others, *templates]
            ready = select.select(waiting, [], [], left)[0]
            for pipe in pipes:
                if pipe in ready:
                    pipe.read()
            if self._template in ready:
                self._template.read_messages()
            if not ready or any(other in ready for other in others):
                return None

    def ask(self, kind: str, answer: str, /, **content: Any) -> Message | TrainerEnd:
        """Send a request, and return the next message of kind `answer`, or the trainer's end."""
        self.send(kind, **content)
        return self.wait_for_kind(answer)

    def wait_for_kind(self, kind: str) -> Message | TrainerEnd:
        """Return the trainer's next message of kind `kind`, or the trainer's end."""
        while True:
            found = self.wait(None)
            if isinstance(found, TrainerEnd) or (found is not None and found.kind == kind):
                return found

    def interrupt(self) -> None:
        """Send a signal that raises an exception in the objective, so that the objective ends."""
        self._send_signal(INTERRUPT)

    def find_stack(self) -> Sequence[FrameSummary]:
        """Return the objective's stack in the trainer's main thread; empty if it is not known."""
        if not self.has_started:  # It does not answer yet.
            return ()
        start = os.fstat(self._stack_file).st_size
        with suppress(BrokenPipeError):
            os.write(self._stack_requests, b".")
        give_up_at = time.monotonic() + _SECONDS_TO_WRITE_STACKS
        size = start
        while time.monotonic() < give_up_at:
            time.sleep(_POLL_SECONDS)
            before = size
            size = os.fstat(self._stack_file).st_size
            if start < size == before:
                break
        return self._read_frames(start)

    def read_thread_state(self) -> tuple[bool, int]:
        """Return whether the trainer's main thread sleeps, and its CPU time in ticks of 10 ms."""
        with suppress(OSError, ValueError, IndexError):
            values = read_stat_fields(Path(f"/proc/{self.process}/task/{self.process}"))
            return values[0] == "S", int(values[11]) + int(values[12])
        return False, 0

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed_at < math.inf

    def kill(self) -> None:
        """Kill the process."""
        self._killed_at = min(self._killed_at, time.monotonic())
        self._send_signal(signal.SIGKILL)

    def discard(self) -> None:
        """Kill the process, and close the connection."""
        self.kill()
        self.close()

    def wait_for_exit(self) -> None:
        """Wait until a process whose connection was closed has ended, and has freed its memory.

        A process that takes too long is killed. It may not end, for example if the driver of a GPU
        keeps it.
        """
        if not self.has_lost_template:  # Otherwise it has ended with its template.
            self._wait_for_status()

    def _wait_for_status(self) -> int | None:
        """Return the exit status; kill the process, and return None, if it does not end in time."""
        status = self._template.wait_for_status(self.process)
        if status is None:
            self.kill()
            self._template.wait_for_status(self.process)
        return status

    def close(self) -> None:
        """Close the connection, so that the process ends, and read its output so far."""
        self._channel.close()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        if self._stack_file >= 0:
            os.close(self._stack_file)
            os.close(self._stack_requests)
            self._stack_file = -1

    def read_output(self) -> None:
        """Read all output so far, including an incomplete line."""
        self.read_lines()
        for pipe in self._pipes:
            pipe.end_line()

    def has_watchdog_aborted(self, ended: TrainerEnd) -> bool:
        """Return whether NCCL's watchdog has ended the process, since a collective timed out."""
        words = ("Watchdog caught collective operation timeout", "operation timed out")
        lines = "\n".join(self._output.last_errors)
        return ended.status == -signal.SIGABRT and any(word in lines for word in words)

    @property
    def has_lost_template(self) -> bool:
        """Whether the template has crashed, which ends all its trainers."""
        self._template.read_messages()
        return not self._template.is_open or self._template.crash_count > self._template_crash_count

    def read_lines(self) -> None:
        """Read all complete lines that the trainer has printed so far."""
        for pipe in self._pipes:
            pipe.read()

    def _send_signal(self, number: int) -> None:
        if not self._template.has_ended(self.process):
            with suppress(ProcessLookupError):
                os.kill(self.process, number)

    def _describe_end(self, closed: str) -> TrainerEnd:
        """Return how the trainer has ended; kill it if it has only closed its connection.

        `closed` is the error of the connection, or empty.
        """
        status = self._wait_for_status()
        self.read_lines()
        frames = self._read_frames(0)
        if status is None and not self.is_killed:
            return TrainerEnd(f"the trainer has closed its connection ({closed})", frames)
        text = f"the trainer {describe_status(status)}{self._explain_status(status, frames)}"
        return TrainerEnd(text + self.describe_last_error(), frames, status)

    def _explain_status(self, status: int | None, frames: Sequence[FrameSummary]) -> str:
        """Return a likely cause of an exit status, as the end of a sentence; empty without one."""
        if status == 0:
            return ": return, or raise an exception"
        if status == -signal.SIGKILL and not self.is_killed:
            is_sure = count_memory_kills() > self._memory_kill_count
            return f", {'' if is_sure else 'perhaps '}by the kernel for want of memory"
        has_collective = any(COLLECTIVES_PATH in frame.filename for frame in frames)
        if status == -signal.SIGABRT and has_collective:
            return (
                ", most likely because the ranks of its worker were in collectives of different "
                "sizes, or in different numbers of them (hpo check compares them)"
            )
        return ""

    def describe_last_error(self) -> str:
        """Return the latest line on standard error, as the end of a sentence; empty without any.

        A line that names an exception is preferred, since a hint may follow it.
        """
        lines = [_ESCAPE_SEQUENCE.sub("", line).strip() for line in self._output.last_errors]
        errors = [line for line in lines if not line.startswith("Fatal Python error")]
        exceptions = [line for line in errors if _EXCEPTION_LINE.match(line)]
        found = (exceptions or errors)[-1:]
        return (
            f"; its last {'error' if exceptions else 'line'} on stderr: {found[0]}" if found else ""
        )

    def _read_frames(self, start: int) -> Sequence[FrameSummary]:
        size = os.fstat(self._stack_file).st_size
        header = os.pread(self._stack_file, 100, 0).decode(errors="replace").partition("\n")[0]
        dump = os.pread(self._stack_file, size - start, start).decode(errors="replace")
        return find_frames(header, dump)


@dataclass
class TrainerSlot:
    """Holds the trainer of this rank. There is at most one, and it is forked when it is needed."""

    _template: TemplateClient
    output: TrainerOutput
    _options: TrainerOptions
    _is_fresh: bool = False
    """Whether each evaluation gets a new trainer."""
    is_attended: bool = False
    """Whether evaluations use the terminal of this rank."""
    group_name: str = ""
    """Name of the process group that the trainer is in."""
    first_free_memory: int = 0
    """Bytes of the GPU that were free when the first evaluation began."""
    _variables: Mapping[str, str] = field(default_factory=dict)  # additional ones of the trainer
    _trainer: TrainerClient | None = None
    _ending: TrainerClient | None = None
    """It was closed or killed, and may still hold memory of a GPU."""
    _has_warned: bool = False

    def find_member(self, group_name: str) -> TrainerClient | None:
        """Return the trainer if it is running, and in the process group with this name.

        A trainer that has not joined a group yet is in none, whose name is empty.
        """
        is_member = self.group_name == group_name != ""
        return self._trainer if is_member and self._is_running() else None

    def provide_trainer(self, variables: Mapping[str, str]) -> TrainerClient:
        """Return a trainer with these additional environment variables.

        It is forked, after the last one has ended, unless such a trainer is running.
        """
        if self._trainer is not None and self._is_running() and self._variables == variables:
            return self._trainer
        self.discard_trainer()
        self._wait_for_exit()
        self._variables = variables
        self._trainer = TrainerClient(
            self._template, self.output, self._options, variables, self.is_attended
        )
        return self._trainer

    def fork_other(self, output: TrainerOutput | None = None) -> TrainerClient:
        """Fork an additional trainer, which the caller must end. `output` takes its lines."""
        return TrainerClient(self._template, output or TrainerOutput(), self._options)

    def finish_evaluation(self, is_clean: bool) -> None:
        """Close the trainer after an evaluation, unless it is clean, and can be reused."""
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

    def _is_running(self) -> bool:
        """Return whether there is a trainer that is running, as far as this rank knows."""
        if self._trainer is None:
            return False
        self._template.read_messages()
        return not self._template.has_ended(self._trainer.process)

    def _wait_for_exit(self) -> None:
        """Wait until the trainer that was closed or killed last has ended."""
        if self._ending is not None:
            self._ending.wait_for_exit()
            self._ending = None

    def _close_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._ending = self._trainer
            self._trainer = None
        self.group_name = ""


@dataclass
class ConstraintClient:
    """Sends requests about constraints to a trainer, which runs the user's constraint functions.

    The trainer is forked at the first request. If it ends, it is replaced once.

    Raises:
        RunError: The trainer does not answer in time, or has ended twice.
    """

    _fork: Callable[[], TrainerClient]
    _trainer: TrainerClient | None = None
    _end_count: int = 0

    def __call__(self, **content: Any) -> Mapping[str, Any]:
        """Send a request, and return the answer; `hpo.trainer.search_file` describes both."""
        while True:
            if self._trainer is None:
                self._trainer = self._fork()
            self._trainer.send("constraints", **content)
            while (found := self._trainer.wait(_SECONDS_TO_ANSWER)) is not None:
                if isinstance(found, TrainerEnd):
                    break
                if found.kind == "constraints":
                    return found.content
            self.close()
            self._end_count += 1
            if found is None:
                limit = f"{_SECONDS_TO_ANSWER:g} s"
                raise RunError(f"the constraints of the search space must answer within {limit}")
            if self._end_count > 1:
                raise RunError(
                    f"the constraints of the search space cannot be evaluated: {found.text}"
                )

    def close(self) -> None:
        """End the trainer."""
        if self._trainer is not None:
            self._trainer.discard()
            self._trainer = None


def run_test_in_trainer(
    fork: Callable[[], TrainerClient], params: Mapping[str, Any], weights: Path
) -> Iterator[Mapping[str, Any]]:
    """Call the search file's `test` function in a new trainer, and yield the messages about it.

    `hpo.trainer.final_test.run_test` sends them. If the trainer ends before the test, the final
    message has the kind "failure".
    """
    trainer = fork()
    try:
        found = trainer.ask("test", "tested", params=dict(params), weights=str(weights.absolute()))
        while not isinstance(found, TrainerEnd) and found["kind"] != "end":
            yield found.content
            found = trainer.wait_for_kind("tested")
        if isinstance(found, TrainerEnd):
            yield {"kind": "failure", "text": found.text}
    finally:
        trainer.discard()
