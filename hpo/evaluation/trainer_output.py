"""Receive the lines that a trainer and its child processes print: label, show and keep them."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import suppress
from typing import Protocol, TextIO

from hpo.evaluation_api import NOTE_PATTERN

_MAX_CHARACTERS = 64 * 1024  # number of characters that are kept, per rank and step: the last ones
_MAX_READ_BYTES = 1 << 16
_LAST_ERROR_LINES = 5  # lines on standard error that are kept for the failure of a crashed trainer
_TERMINATED = "terminate called without an active exception"  # std::terminate of libstdc++
_TRACEBACK = "Traceback (most recent call last)"


class OutputListener(Protocol):
    """Receives the printed lines of a program, and notes about its checkpoints and weights."""

    def take_line(self, line: str, stream: str = "stdout") -> None:
        """Receive a line of standard output or standard error."""

    def take_note(self, note: str, stream: str) -> None:
        """Receive a note that precedes the next line; see `hpo.evaluation_api`."""


class TrainerOutput:
    """Lines of one rank's trainers, labelled `worker 1 rank 0 |`.

    If a program redraws a line, such as a progress bar, only the final version is shown.

    Attributes:
        last_errors: The latest lines on standard error.
        listener: Receives the lines and the notes of a program. None unless a program runs.
    """

    def __init__(self) -> None:
        self.label = ""
        self.rank = 0
        self._lines: deque[str] = deque()
        self._character_count = self._dropped_lines = 0
        self.last_errors: deque[str] = deque(maxlen=_LAST_ERROR_LINES)
        self._has_traceback = False
        self.listener: OutputListener | None = None

    def set_label(self, worker: int, rank: int) -> None:
        """Label the next lines with this worker and rank."""
        self.label = f"worker {worker} rank {rank}"
        self.rank = rank

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

    def add_lines(self, lines: list[str], stream: str) -> None:
        """Show lines with their label, and keep them for `take_printed`."""
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        if stream == "stderr":
            self.last_errors.extend(line for line in shown if line.strip())
            # Torch puts [rank0]: in front.
            self._has_traceback |= any(_TRACEBACK in line for line in shown)
        if self.listener is not None:
            for line in shown:
                self.listener.take_line(line, stream)
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

    def add_note(self, note: str, stream: str) -> None:
        """Pass a note to the listener."""
        if self.listener is not None:
            self.listener.take_note(note, stream)

    def take_printed(self) -> str:
        """Return the lines since the previous call, labelled with the rank."""
        lines = list(self._lines)
        if self._dropped_lines:
            lines.insert(0, f"({self._dropped_lines} earlier lines are not kept)")
        self._lines.clear()
        self._character_count = self._dropped_lines = 0
        return "".join(f"rank {self.rank} | {line}\n" for line in lines)


class OutputPipe:
    """The reading end of a pipe for a trainer's standard output or standard error.

    Args:
        output: Takes the lines.
        stream: "stdout" or "stderr".
    """

    def __init__(self, output: TrainerOutput, stream: str) -> None:
        self._output = output
        self._stream = stream
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._partial_line = b""
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
                self._output.add_note(note.decode(errors="replace"), self._stream)
                self._take_lines(self._partial_line + text)

    def _take_lines(self, text: bytes) -> None:
        """Pass on the complete lines of a text, and keep an incomplete last line."""
        *lines, rest = text.split(b"\n")
        # A carriage return overwrites the text before.
        self._partial_line = rest[rest[:-1].rfind(b"\r") + 1 :]
        if len(self._partial_line) > _MAX_CHARACTERS:
            lines = [*lines, self._partial_line]
            self._partial_line = b""
        self._add_lines(lines)

    def end_line(self) -> None:
        """Pass on an incomplete line as if it were complete, because no more output is expected."""
        line = self._partial_line
        self._partial_line = b""
        self._add_lines([line] if line else [])

    def _add_lines(self, lines: list[bytes]) -> None:
        if lines:
            texts = [line.decode(errors="replace") for line in lines]
            self._output.add_lines(texts, self._stream)

    def close_write_end(self) -> None:
        """Close this process's copy of the writing end."""
        os.close(self.write_end)

    def close(self) -> None:
        """Read the remaining output, and close the pipe."""
        self.read()
        self.end_line()
        os.close(self._read_end)
