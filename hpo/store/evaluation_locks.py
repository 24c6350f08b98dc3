"""Let several processes evaluate individuals of one run, and notice when one of them ends.

The locks are on bytes of the file `lock` of the run directory. Byte 0 is locked while a process
changes the run, and byte 1 + n while a process evaluates trial n. The operating system releases the
locks of a process when it ends, on all hosts of a shared file system (fcntl_locking(2)). A run of
ranks locks the whole file (`RunDir.hold_lock`), so both exclude each other.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpo.errors import RunError, UsageError
from hpo.store.run_dir import RunDir, held_locks, identify_file
from hpo.text_format import make_printable

_MOST_SECONDS = 120.0  # Many processes of a job array may start at the same time.
_SECONDS_BETWEEN_TRIES = 0.01
_opened: dict[tuple[int, tuple[int, int]], EvaluationLocks] = {}


class EvaluationLocks:
    """The locks of this process on the file `lock` of a run, see `open_evaluation_locks`.

    The file stays open until the process ends: to close it would release all locks.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._file = os.open(run_dir.lock, os.O_RDWR | os.O_CLOEXEC)
        self._identity = identify_file(run_dir.lock)
        self._threads = threading.Lock()
        self._locked: set[int] = set()  # Bytes.
        self._abandoned: set[int] = set()

    @contextmanager
    def exclude_others(self) -> Iterator[None]:
        """Inside ``with``, keep all other threads and processes from changing the run.

        Raises UsageError if a run of ranks does not end, or if the file system has no locks.
        """
        with self._threads:
            self._wait_for_others()
            try:
                yield
            finally:
                self._unlock(0)

    def hold(self, trial: int) -> None:
        """Show that this process evaluates a trial. Call it inside `exclude_others`."""
        if not self._lock(1 + trial):
            raise RunError(f"{self._run_dir.lock}: another process evaluates trial {trial}")

    def release(self, trials: Iterable[int]) -> None:
        """Show that this process no longer evaluates these trials."""
        for trial in trials:
            self._unlock(1 + trial)

    def abandon(self, trials: Iterable[int]) -> None:
        """Release trials without a result: that is not a crash of the process."""
        self._abandoned.update(trials)
        self.release(trials)

    def is_abandoned(self, trial: int) -> bool:
        """Return whether this process has abandoned a trial."""
        return trial in self._abandoned

    def is_held(self, trial: int) -> bool:
        """Return whether any process evaluates a trial. Call it inside `exclude_others`."""
        if 1 + trial in self._locked or not self._lock(1 + trial):
            return True
        self._unlock(1 + trial)
        return False

    def _wait_for_others(self) -> None:
        until = time.monotonic() + _MOST_SECONDS
        while not self._lock(0):
            if time.monotonic() > until:
                # To open the file and close it again would release all locks.
                named = os.pread(self._file, 200, 0).decode(errors="replace").strip()
                holder = make_printable(named) or "other processes"
                raise UsageError(
                    f"{self._run_dir.path} has been in use by {holder} for {_MOST_SECONDS:.0f} s: "
                    "wait for the end, or name another directory"
                )
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _lock(self, byte: int) -> bool:
        """Lock a byte, and return whether this was possible."""
        with held_locks.guard:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):
                return False
            except OSError as error:
                raise UsageError(
                    f"{self._run_dir.lock} cannot be locked ({error.strerror}): name a directory "
                    "on another file system"
                ) from error
            self._locked.add(byte)
            held_locks.files.add(self._identity)
        return True

    def _unlock(self, byte: int) -> None:
        with held_locks.guard:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
            self._locked.discard(byte)
            if not self._locked:
                held_locks.files.discard(self._identity)


def open_evaluation_locks(run_dir: RunDir) -> EvaluationLocks:
    """Return the locks of this process on the file `lock` of a run, whose directory must exist.

    All callers in a process share them, because a process does not exclude itself.
    """
    run_dir.lock.touch()
    # A forked process has none of the locks of its parent.
    key = (os.getpid(), identify_file(run_dir.lock))
    with held_locks.guard:
        if key not in _opened:
            _opened[key] = EvaluationLocks(run_dir)
        return _opened[key]
