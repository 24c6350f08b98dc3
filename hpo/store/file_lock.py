"""Lock journal files on file systems that several hosts share, in the same way as Optuna."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from optuna.storages.journal import JournalFileSymlinkLock

from hpo.process import clock

_MIN_SLEEP = 0.001
_MAX_SLEEP = 1.0


class FileLock(JournalFileSymlinkLock):
    """Lock a file by creating the symbolic link PATH.lock, as all programs that use Optuna do.

    If the file has not changed for `stale_after` seconds, a waiting process removes the lock, because its owner has
    probably crashed. The time in which the waiting process is suspended does not count. Optuna's own lock counts this
    time, so ranks would remove each other's locks after a suspension.
    """

    def __init__(self, path: Path, stale_after: float = math.inf) -> None:
        super().__init__(str(path.absolute()))
        self._path = path.absolute()
        self._link = self._path.with_name(self._path.name + ".lock")
        self._stale_after = stale_after

    def acquire(self) -> bool:
        """Wait for the lock, take it, and return True. Raises OSError if the link cannot be created."""
        pause, seen, since = _MIN_SLEEP, -1.0, clock.now()
        while True:
            with suppress(FileExistsError):
                self._link.symlink_to(self._path)
                return True
            if (mtime := self._read_mtime()) != seen:
                seen, since = mtime, clock.now()
            elif clock.now() - since > self._stale_after:
                with suppress(RuntimeError):  # Another rank has removed the lock.
                    self.release()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP)

    def release(self) -> None:
        """Release the lock. Raises RuntimeError if another process has removed it."""
        mine = self._link.with_name(f"{self._link.name}.{os.getpid()}.rename")
        try:
            self._link.rename(mine)  # If several processes remove a stale lock, only one rename succeeds.
            mine.unlink()
        except OSError as error:
            raise RuntimeError(f"{self._link} was taken away") from error

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _read_mtime(self) -> float:
        try:
            return self._path.stat().st_mtime
        except OSError:
            return math.nan  # NaN never equals the time before.
