"""A lock that hosts share through a file system, as Optuna's journals do: a link, which only one process can make."""

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
    """The lock of the file at a path: the symbolic link PATH.lock, as all programs that use Optuna make it.

    Where nothing was written to the file for `stale_after` seconds, the lock's holder is taken to be dead. Optuna's own
    lock counts the seconds in which a job was suspended, too: afterwards, ranks took each other's locks away.
    """

    def __init__(self, path: Path, stale_after: float = math.inf) -> None:
        super().__init__(str(path.absolute()))
        self._path = path.absolute()
        self._link = self._path.with_name(self._path.name + ".lock")
        self._stale_after = stale_after

    def acquire(self) -> bool:
        """Wait for the lock, take it, and return true; raises OSError where it cannot be made."""
        pause, seen, since = _MIN_SLEEP, -1.0, clock.now()
        while True:
            with suppress(FileExistsError):
                self._link.symlink_to(self._path)
                return True
            if (written := self._read_mtime()) != seen:
                seen, since = written, clock.now()
            elif clock.now() - since > self._stale_after:
                with suppress(RuntimeError):  # another rank was first
                    self.release()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_SLEEP)

    def release(self) -> None:
        """Release the lock; raises RuntimeError where another process has taken it away."""
        mine = self._link.with_name(f"{self._link.name}.{os.getpid()}.rename")
        try:
            self._link.rename(mine)  # where several processes release a stale lock, one succeeds
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
            return math.nan  # and so never the same as before
