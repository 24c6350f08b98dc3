"""What objectives have printed: a file for each evaluation that has printed anything, and the end of such a file."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpo.process.standard_streams import warn
from hpo.text_format import escape_unencodable

_MAX_BYTES_KEPT = 1 << 20  # bytes of an evaluation
_MAX_LINES_READ = 200  # that are read of it
_MAX_BYTES_READ = 1 << 20  # of those lines
_CHUNK_SIZE = 1 << 20


class OutputLog:
    """Writes what evaluations print to files; `path_of` returns the path for a trial."""

    def __init__(self, make_path: Callable[[int], Path]) -> None:
        self._make_path = make_path
        self._byte_counts: Counter[int] = Counter()
        self._pending: dict[int, bytes] = {}
        self._has_failed = False

    def add(self, trial: int, text: str) -> None:
        """Add lines to what an evaluation has printed, up to a limit."""
        if not text or self._byte_counts[trial] > _MAX_BYTES_KEPT or self._has_failed:
            return
        content = escape_unencodable(text).encode()
        self._byte_counts[trial] += len(content)
        if self._byte_counts[trial] > _MAX_BYTES_KEPT:
            content += f"(what it printed from here on is not kept: {_MAX_BYTES_KEPT} bytes are the most)\n".encode()
        self._pending[trial] = self._pending.get(trial, b"") + content

    def write(self) -> None:
        """Append what was added to the files; the search goes on if it cannot be written.

        It is written later where no file can be opened: an objective may have used up all descriptors, for a while.
        """
        while self._pending:
            trial, content = next(iter(self._pending.items()))
            path = self._make_path(trial)
            try:
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as file:
                    file.write(content)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return
                self._has_failed = True
                self._pending.clear()
                warn(f"warning: what objectives print is not kept: {path}: {error.strerror}")
            self._pending.pop(trial, None)


@dataclass(frozen=True)
class LogTail:
    """The last `lines` of a file, how many there are `before` them, and why it cannot be read, if it cannot."""

    path: Path
    lines: list[str]
    lines_before: int = 0
    problem: str = ""


def read_log_tail(path: Path) -> LogTail | None:
    """Read the end of a file, whose last line may be incomplete; None where there is no file, or nothing in it."""
    if not path.exists():
        return None
    if not path.is_file():
        return LogTail(path, [], problem="it is no file")
    ended, end = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_SIZE):
                ended += chunk.count(b"\n")
                end = (end + chunk)[-_MAX_BYTES_READ:]
    except OSError as error:
        return LogTail(path, [], problem=error.strerror or str(error))
    if not end:
        return None
    count = ended + (not end.endswith(b"\n"))
    lines = end.decode("utf-8", "replace").removesuffix("\n").split("\n")[-_MAX_LINES_READ:]
    return LogTail(path, lines, count - len(lines))
