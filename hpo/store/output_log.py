"""Store the printed output of each evaluation in a file, and read the last lines of such a file."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpo.process.standard_streams import warn
from hpo.text_format import escape_unencodable

_MAX_BYTES_KEPT = 1 << 20  # Bytes that are stored for each evaluation.
_MAX_LINES_READ = 200
_MAX_BYTES_READ = 1 << 20
_CHUNK_SIZE = 1 << 20


class OutputLog:
    """Write the output of evaluations to files; `make_path` returns the path for a trial."""

    def __init__(self, make_path: Callable[[int], Path]) -> None:
        self._make_path = make_path
        self._byte_counts: Counter[int] = Counter()
        self._pending: dict[int, bytes] = {}
        self._has_failed = False

    def add(self, trial: int, text: str) -> None:
        """Add lines to the output of an evaluation; drop them after about 1 MiB."""
        if not text or self._byte_counts[trial] > _MAX_BYTES_KEPT or self._has_failed:
            return
        content = escape_unencodable(text).encode()
        self._byte_counts[trial] += len(content)
        if self._byte_counts[trial] > _MAX_BYTES_KEPT:
            content += f"(output after {_MAX_BYTES_KEPT} bytes is not stored)\n".encode()
        self._pending[trial] = self._pending.get(trial, b"") + content

    def write(self) -> None:
        """Append the added lines to the files, and warn once if that fails.

        If too many files are open, keep the lines for the next call. An objective may use all file
        descriptors for a while.
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
                warn(
                    f"warning: the output of evaluations cannot be stored: {path}: {error.strerror}"
                )
            self._pending.pop(trial, None)


@dataclass(frozen=True)
class LogTail:
    """Hold the last lines of a file."""

    path: Path
    lines: list[str]
    lines_before: int = 0
    """Number of lines in the file before `lines`."""
    problem: str = ""
    """Reason why the file cannot be read; empty if it can."""


def read_log_tail(path: Path) -> LogTail | None:
    """Return the last lines of a file, even an incomplete one; None without any."""
    if not path.exists():
        return None
    if not path.is_file():
        return LogTail(path, [], problem="it is not a file")
    line_breaks = 0
    end = b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_SIZE):
                line_breaks += chunk.count(b"\n")
                end = (end + chunk)[-_MAX_BYTES_READ:]
    except OSError as error:
        return LogTail(path, [], problem=error.strerror or str(error))
    if not end:
        return None
    count = line_breaks + (not end.endswith(b"\n"))
    lines = end.decode("utf-8", "replace").removesuffix("\n").split("\n")[-_MAX_LINES_READ:]
    return LogTail(path, lines, count - len(lines))
