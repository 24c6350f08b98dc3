"""What objectives have printed: a file for each evaluation that has printed anything, and the end of such a file."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpo.process.printed import warn
from hpo.text import showable

_MOST_KEPT = 1 << 20  # bytes of an evaluation
_MOST_LINES = 200  # that are read of it
_MOST_BYTES = 1 << 20  # of those lines
_CHUNK = 1 << 20


class Log:
    """Writes what evaluations print to files; `path_of` returns the path for a trial."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._added: Counter[int] = Counter()
        self._waiting: dict[int, bytes] = {}
        self._failed = False

    def add(self, trial: int, text: str) -> None:
        """Add lines to what an evaluation has printed, up to a limit."""
        if not text or self._added[trial] > _MOST_KEPT or self._failed:
            return
        content = showable(text).encode()
        self._added[trial] += len(content)
        if self._added[trial] > _MOST_KEPT:
            content += f"(what it printed from here on is not kept: {_MOST_KEPT} bytes are the most)\n".encode()
        self._waiting[trial] = self._waiting.get(trial, b"") + content

    def write(self) -> None:
        """Append what was added to the files; the search goes on if it cannot be written.

        It is written later where no file can be opened: an objective may have used up all descriptors, for a while.
        """
        while self._waiting:
            trial, content = next(iter(self._waiting.items()))
            path = self._path_of(trial)
            try:
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as file:
                    file.write(content)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return
                self._failed = True
                self._waiting.clear()
                warn(f"warning: what objectives print is not kept: {path}: {error.strerror}")
            self._waiting.pop(trial, None)


@dataclass(frozen=True)
class LogEnd:
    """The last `lines` of a file, how many there are `before` them, and why it cannot be read, if it cannot."""

    path: Path
    lines: list[str]
    before: int = 0
    problem: str = ""


def read_log(path: Path) -> LogEnd | None:
    """Read the end of a file, whose last line may be incomplete; None where there is no file, or nothing in it."""
    if not path.exists():
        return None
    if not path.is_file():
        return LogEnd(path, [], problem="it is no file")
    ended, end = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ended += chunk.count(b"\n")
                end = (end + chunk)[-_MOST_BYTES:]
    except OSError as error:
        return LogEnd(path, [], problem=error.strerror or str(error))
    if not end:
        return None
    count = ended + (not end.endswith(b"\n"))
    lines = end.decode("utf-8", "replace").removesuffix("\n").split("\n")[-_MOST_LINES:]
    return LogEnd(path, lines, count - len(lines))
