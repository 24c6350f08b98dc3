"""Test the folder of the run directory: locks, durable renames, and whether all hosts see the same files."""

from __future__ import annotations

import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from hpo.check.cluster_facts import FolderFacts, FolderView
from hpo.errors import RunError, UsageError
from hpo.ranks.communicator import SleepingComm, sleep_until
from hpo.store.run_dir import find_existing, try_system_lock, write_atomically

_WRITES = 10
_SECONDS_TO_SEE = 10.0  # maximum seconds to wait until another host has seen a change
_LOCK, _NOTE = "lock", "note"


class FolderTest:
    """A test of the folder in which a run directory is, or would be made.

    It writes into a temporary folder, which `close` removes.

    Raises:
        UsageError: The folder cannot be used.
    """

    def __init__(self, run_dir: Path) -> None:
        self._resources = ExitStack()
        existing = find_existing(run_dir)
        try:
            temporary = tempfile.TemporaryDirectory(prefix=".hpo-check-", dir=existing)
            self.folder = Path(self._resources.enter_context(temporary))
            seconds = statistics.median(_time_durable_write(self.folder / "written") for _ in range(_WRITES))
            lock = self._resources.enter_context((self.folder / _LOCK).open("w"))
            has_locks = try_system_lock(lock) is True
            free = shutil.disk_usage(existing).free
        except (OSError, RunError) as error:
            self.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--run-dir {run_dir}: {existing} cannot be used: {reason}") from error
        self.facts = FolderFacts(existing, find_file_system(existing.resolve()), free, has_locks, seconds)

    def close(self) -> None:
        """Remove the temporary folder."""
        with suppress(OSError):  # Another host may have it open on NFS.
            self._resources.close()


def compare_views(heads: SleepingComm, folder: Path, is_stopping: Callable[[], bool]) -> list[FolderView]:
    """Return how each host sees the temporary folder of a `FolderTest`. Collective: call on all ranks of `heads`.

    Args:
        heads: Communicator of one rank of each host. Its first rank has made the folder.
        is_stopping: Returns whether the check must end soon. It then waits no longer for other hosts.
    """

    def wait_for(done: Callable[[], bool]) -> float | None:
        began = time.monotonic()
        sleep_until(lambda: done() or is_stopping(), _SECONDS_TO_SEE)
        return time.monotonic() - began if done() else None

    note = folder / _NOTE
    if heads.rank == 0:
        note.write_text("first")
    heads.barrier()
    own = FolderView(0.0, sees_lock=True, is_seen=True)
    if heads.rank != 0:
        own = FolderView(wait_for(lambda: _read(note) == "first"), sees_lock=_is_locked(folder / _LOCK))
        try:
            _make_host_path(folder, heads.rank).touch()
        except OSError as error:
            own = replace(own, write_error=error.strerror or str(error))
    heads.barrier()
    if heads.rank == 0:
        write_atomically(note, b"second")
    heads.barrier()
    if heads.rank != 0 and own.seconds_to_see is not None:
        own = replace(own, seconds_to_see=wait_for(lambda: _read(note) == "second"))
    views: list[FolderView] = heads.allgather(own)
    if heads.rank == 0 and all(view.seconds_to_see is not None and not view.write_error for view in views):
        files = [_make_host_path(folder, host) for host in range(heads.size)]
        wait_for(lambda: set(files[1:]) <= set(folder.iterdir()))
        seen = {files[0], *folder.iterdir()}
        views = [replace(view, is_seen=file in seen) for view, file in zip(views, files, strict=True)]
    return views


def _make_host_path(folder: Path, host: int) -> Path:
    return folder / f"host-{host}"


def find_file_system(path: Path) -> str:
    """Return the type of the file system of a path, such as nfs4; an empty text if it is unknown."""
    with suppress(OSError, ValueError):  # Only Linux has /proc.
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mounts = [(Path(_unescape(words[1])), words[2]) for words in lines]
        # The last of several mounts at one place hides the others.
        above = (
            (len(place.parts), index, kind) for index, (place, kind) in enumerate(mounts) if path.is_relative_to(place)
        )
        return max(above)[2]
    return ""


def _unescape(text: str) -> str:
    r"""Return a path from /proc/mounts, in which a space is ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _time_durable_write(path: Path) -> float:
    began = time.perf_counter()
    write_atomically(path, b"durable")
    return time.perf_counter() - began


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _is_locked(path: Path) -> bool:
    with suppress(OSError), path.open() as file:
        return try_system_lock(file, shared=True) is False
    return False
