"""Optuna's journal file, made safe against writers that die or run out of disk in the middle of a line."""

from __future__ import annotations

import json
import os
from io import RawIOBase
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from hpo.errors import RunError
from hpo.lock import FileLock

_STALE_AFTER = 30.0  # seconds, as Optuna has it


class Journal(JournalFileBackend):
    """A journal file that a torn line does not make unreadable.

    A writer that was killed, or whose disk was full, leaves the beginning of a line, and Optuna's backend would write
    the next line behind it: neither could be read then, nor anything after them. Here a writer first cuts off what
    another one left, and takes back what it could not write whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._guard = FileLock(self._path, _STALE_AFTER)
        super().__init__(str(self._path), self._guard)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines, durably and all of them; RunError where there is no room, and then none of them is there."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            self._guard.acquire()
            try:
                self._append(lines)
            finally:
                self._guard.release()
        except RuntimeError as error:  # as the lock says it
            raise RunError(f"{self._path}: its lock was taken away while this rank wrote; was it stopped?") from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; what it holds is whole, --resume goes on with it"
            ) from error

    def _append(self, lines: bytes) -> None:
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_APPEND), "r+b", buffering=0) as file:
            end = _cut_torn_line(file)
            try:
                while lines:
                    lines = lines[file.write(lines) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise


def _cut_torn_line(file: RawIOBase) -> int:
    """Cut off what follows the last line break of an open file, and give the position behind it."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep and (file.seek(keep - 1), file.read(1))[1] != b"\n":
        keep -= 1
    if keep < end:
        file.truncate(keep)
    return keep


def damage(path: Path) -> str | None:
    """Say what is wrong with a journal file that could not be read; None if each of its lines is one of a journal."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
            except ValueError:
                return f"line {number} is not JSON: {line[:40]!r}"
            if not isinstance(entry, dict) or "op_code" not in entry:
                return f"line {number} is not an entry of a journal: {line[:40]!r}"
    return None


def is_begun(path: Path) -> bool:
    """Tell whether a file is missing, empty, or the beginning of a journal's first line, which makes a study."""
    if not path.exists():
        return True
    first = b'{"op_code":0,'
    with path.open("rb") as file:
        content = file.read(65536)
    return b"\n" not in content and (content.startswith(first) or first.startswith(content))
