"""What objectives print: each line is marked with its worker and rank, and is kept with its evaluation."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from hpo.text import printable_text

_MOST_KEPT = 64 * 1024  # characters that a rank prints from loss to loss; of more, the last are kept


class Printed:
    """Replaces the standard streams by streams that mark lines, and collects what is printed while it is `marking`.

    Each line is written at once and whole, behind ``worker 1 rank 0 |``, so that lines of several ranks do not mix. Of
    a line that is drawn again and again, such as a progress bar, only the last state is written. What native libraries
    and other programs print is not marked.
    """

    def __init__(self, label: str) -> None:
        """Begin with a `label` for a rank that belongs to no worker yet."""
        self.label = label
        self.marking = False
        self._rank = 0
        self._lines: deque[str] = deque()
        self._kept = self._left_out = 0
        self._lock = threading.Lock()
        self._streams: list[Marked] = []
        self._installed = sys.stdout, sys.stderr

    def install(self) -> None:
        """Replace the standard streams, before other code keeps a reference to them."""
        if sys.stdout is not None:  # else it was closed
            sys.stdout = self._marked(sys.stdout)
        if sys.stderr is not None:
            sys.stderr = self._marked(sys.stderr)
        self._installed = sys.stdout, sys.stderr
        os.register_at_fork(after_in_child=self._become_another)

    def always_marked(self) -> TextIO:
        """Return standard error as a stream whose lines are marked at any time, for logs."""
        return self._marked(sys.__stderr__ or io.StringIO(), always=True)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Mark and keep what is printed: while an objective runs."""
        self.marking = True
        try:
            yield
        finally:
            self.marking = False
            self.take()
            sys.stdout, sys.stderr = self._installed  # an objective may have put something else there

    def join(self, worker: int, rank: int) -> None:
        """Mark lines as those of this worker and rank."""
        self.label, self._rank = f"worker {worker} rank {rank}", rank

    def add(self, line: str) -> None:
        """Keep a line."""
        with self._lock:
            self._lines.append(line[-_MOST_KEPT:])
            self._kept += len(self._lines[-1])
            while self._kept > _MOST_KEPT and len(self._lines) > 1:
                self._kept -= len(self._lines.popleft())
                self._left_out += 1

    def take(self) -> str:
        """Return what was printed since the last call, as lines that are marked with the rank."""
        for stream in self._streams:
            with suppress(OSError):  # a full disk: the search goes on
                stream.end_line()
        with self._lock:
            lines = list(self._lines)
            if self._left_out:
                lines.insert(0, f"({self._left_out} lines before these are not kept)")
            self._lines.clear()
            self._kept = self._left_out = 0
        return "".join(f"rank {self._rank} | {line}\n" for line in lines)

    def _become_another(self) -> None:
        """Make new locks in a forked process: it has no copy of the other threads, one of which may hold a lock."""
        self._lock = threading.Lock()
        for stream in self._streams:
            stream.become_another()

    def _marked(self, stream: TextIO, always: bool = False) -> TextIO:
        self._streams.append(Marked(stream, self, always))
        return self._streams[-1]  # type: ignore[return-value]


class Marked(io.TextIOBase):
    """A standard stream whose lines are marked while objectives print."""

    def __init__(self, stream: TextIO, printed: Printed, always: bool = False) -> None:
        self.plain = stream
        self._always = always
        self._printed = printed
        self.become_another()

    def write(self, text: str) -> int:
        """Write lines with their mark, each when it is complete; write at once what is not to be marked."""
        if not (self._printed.marking or self._always):
            return self.plain.write(text)
        with self._lock:
            self._begun.append(text)
            self._length += len(text)
            if "\n" in text or self._length > _MOST_KEPT:
                *lines, rest = "".join(self._begun).split("\n")
                self._begin(rest)
                self._emit(lines or [self._end()])
            elif "\r" in text:
                self._begin("".join(self._begun))
        return len(text)

    def end_line(self) -> None:
        """Write a line that has been begun, as if it were complete."""
        with self._lock:
            begun = self._end()
            if begun:
                self._emit([begun])

    def become_another(self) -> None:
        """Begin without a line and with a new lock, as a forked process must: it has no copy of the other threads."""
        self._lock = threading.RLock()
        self._begin("")

    def _begin(self, line: str) -> None:
        """Keep the beginning of a line, without what a carriage return has overwritten."""
        self._begun = [line[line[:-1].rfind("\r") + 1 :]]
        self._length = len(self._begun[0])

    def _end(self) -> str:
        begun = "".join(self._begun)
        self._begin("")
        return begun

    def flush(self) -> None:
        """Flush the real stream; an incomplete line is kept."""
        self.plain.flush()

    def _emit(self, lines: list[str]) -> None:
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        for line in shown if self._printed.marking else ():
            self._printed.add(line)
        self.plain.write("".join(f"{self._printed.label} | {line}\n" for line in shown))
        self.plain.flush()

    def writable(self) -> bool:
        """Return true: this stream can be written to."""
        return True

    def isatty(self) -> bool:
        """Return whether the real stream is a terminal."""
        return self.plain.isatty()

    def fileno(self) -> int:
        """Return the real stream's descriptor."""
        return self.plain.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The real stream's encoding."""
        return self.plain.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What the real stream does about characters that its encoding does not have."""
        return self.plain.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)  # such as the buffer, for bytes


def fill_closed_streams() -> None:
    """Open a null device that cannot be written to in the place of each standard stream that was closed.

    Else the next file that is opened, a study for example, would get the descriptor of a closed stream, and what native
    libraries print would be written into it.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def own_words() -> AbstractContextManager[object]:
    """Let this program print to the real standard output inside ``with``, whatever an objective has put there."""
    return redirect_stdout(sys.__stdout__)


def warn(text: str) -> None:
    """Print a text of this program's own on the real standard error, whatever an objective has put there.

    Errors are ignored: when mpirun is gone, nobody reads the text, and the rank still has to end its job.
    """
    with suppress(OSError, ValueError):  # it is closed, or nobody reads it
        print(printable_text(text), file=sys.__stderr__, flush=True)
