"""Optuna's journal file, made safe against writers that die or run out of disk in the middle of a line."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from hpo.errors import RunError
from hpo.store.lines import Sum, entry_of
from hpo.store.lock import FileLock

# Seconds after which the lock of another program, which may have died, is taken away. A rank that was stopped for a
# shorter time keeps its lock: if it lost it, it would go on to write lines that no longer fit to the file.
_STALE_AFTER = 3600.0


class Journal(JournalFileBackend):
    """A journal file that a torn line does not make unreadable.

    A writer that was killed, or whose disk was full, leaves the beginning of a line, and Optuna's backend would write
    the next line behind it: neither could be read then, nor anything after them. Here a writer first cuts off what
    another one left, and removes its own lines where it could not write all of them.

    Optuna numbers trials by counting lines: if a line were lost, all trials after it would have wrong numbers. Here
    each line has a checksum of the file up to it, which a reader compares.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._guard = FileLock(self._path, _STALE_AFTER)
        super().__init__(str(self._path), self._guard)
        self._written, self._read, self._lines_read = Sum(), Sum(), 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Yield the entries behind the first so many; raises RunError where the file is damaged, or cannot be read."""
        if log_number_from != self._lines_read:
            self._read, self._lines_read = Sum(), 0
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(self._read.offset)
                for line in file:
                    # The line is being written, or its writer has died, or another writer has just cut it off.
                    if not line.endswith(b"\n") or self._read.offset + len(line) > end:
                        return
                    entry = self._entry(line)
                    if self._lines_read > log_number_from:
                        yield entry
        except OSError as error:
            raise RunError(f"{self._path} cannot be read: {error.strerror}") from error

    def _entry(self, line: bytes) -> dict[str, Any]:
        """Return the entry of the next line; raises RunError where the line is damaged."""
        number = self._lines_read + 1
        try:
            entry = entry_of(line)
            if not self._read.vouches_for(line):
                raise ValueError("is not what was written behind the lines before it: one of them was changed, or lost")
        except ValueError as error:
            keep = f", or keep what is before it: head -n {number - 1}" if number > 2 else ""  # two begin a study
            raise RunError(f"{self._path} is damaged: line {number} {error}; restore it{keep}") from None
        self._read.add(line)
        self._lines_read = number
        return entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write entries durably, all of them or none; raises RunError where they cannot be written."""
        try:
            self._guard.acquire()
            try:
                self._append(logs)
            finally:
                self._guard.release()
        except RuntimeError as error:  # the lock raises it
            raise RunError(f"{self._path}: its lock was taken away while this rank wrote; was it stopped?") from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; what it holds is whole, --resume goes on with it"
            ) from error

    def _append(self, logs: list[dict[str, Any]]) -> None:
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_APPEND), "r+b", buffering=0) as file:
            end = _cut_torn_line(file)
            lines = self._sealed(logs, file, end)
            try:
                while lines:
                    lines = lines[file.write(lines) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise

    def _sealed(self, logs: list[dict[str, Any]], file: RawIOBase, end: int) -> bytes:
        """Return entries as lines, with checksums that begin with the first `end` bytes of an open file."""
        if end < self._written.offset:
            self._written = Sum()
        file.seek(self._written.offset)
        while chunk := file.read(end - self._written.offset):
            self._written.add(chunk)
        ahead, lines = copy.copy(self._written), b""
        for log in logs:
            line = ahead.line(log)
            ahead.add(line)
            lines += line
        return lines


def _cut_torn_line(file: RawIOBase) -> int:
    """Cut off what follows the last line break of an open file, and return the position behind it."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep and (file.seek(keep - 1), file.read(1))[1] != b"\n":
        keep -= 1
    if keep < end:
        file.truncate(keep)
    return keep


def is_begun(path: Path) -> bool:
    """Tell whether a file is missing, empty, or the beginning of a journal's first line, which makes a study."""
    if not path.exists():
        return True
    first = b'{"op_code":0,'
    with path.open("rb") as file:
        content = file.read(65536)
    return b"\n" not in content and (content.startswith(first) or first.startswith(content))
