"""Manage run directories: the files of a run, its lock, and its manifest."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpo.errors import RunError, UsageError
from hpo.process.linux import is_alive
from hpo.process.standard_streams import warn
from hpo.store.manifest import Manifest, parse_manifest
from hpo.store.storage_url import is_url
from hpo.text_format import format_error, format_list, make_printable

RUNS_DIR = Path("runs")


class HeldLocks:
    """The files that this process has locked, by device and inode.

    The process must not open and close them, because that would unlock them. The guard is held to
    lock a file, and to open and close a file that may be locked.
    """

    def __init__(self) -> None:
        self.files: set[tuple[int, int]] = set()
        self.guard = threading.RLock()


held_locks = HeldLocks()
# A forked process holds no locks, and another thread of its parent may have held the guard.
os.register_at_fork(after_in_child=held_locks.__init__)  # type: ignore[misc]
_FOLDERS = ("checkpoints", "confirmed", "front", "logs", "mlflow", "tensorboard", "trials", "wandb")
_FILES = re.compile(
    r"best\.safetensors|lock|report\.html|run\.json|search_space-\d+\.\w+|study\.log|"
    r"summary\.json|test\.json"
)


class RunDir:
    """Manage the directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "study.log"  # Of the study, unless the run uses another storage.
        self.run_json = path / "run.json"
        self.summary_json = path / "summary.json"
        self.best_weights = path / "best.safetensors"
        self.front_weights = path / "front"
        self.confirmed_weights = path / "confirmed"
        self.checkpoints = path / "checkpoints"
        self.trial_folders = path / "trials"
        self.test_json = path / "test.json"
        self.report_html = path / "report.html"
        self.lock = path / "lock"
        self.previous_crashed = False  # The previous session in this directory; see `hold_lock`.

    def owns(self, path: Path) -> bool:
        """Return whether the run writes a file, whose path is relative to this directory."""
        first, *inner = path.parts
        return first in _FOLDERS if inner else bool(_FILES.fullmatch(first))

    @property
    def study_name(self) -> str:
        """Name of the run's study in its storage, which is the name of the directory."""
        return self.path.absolute().name

    def get_log_path(self, trial: int, confirms: bool = False) -> Path:
        """Return the file for the output of a trial of the search, or of a confirmation."""
        return self.path / "logs" / f"{'confirm-' if confirms else ''}{trial}.txt"

    @property
    def holds_run(self) -> bool:
        """Whether a run has been started in this directory."""
        return self.run_json.exists() or self.journal.exists()

    def check_usable(self, resume: bool) -> None:
        """Raise UsageError unless a run can start in this directory, or resume if `resume`."""
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                # It raises for a name that is too long; exists() does not on Python 3.14.
                self.path.stat()
            holds_run = self.holds_run
            existing = find_existing(self.path)
        except OSError as error:
            raise UsageError(f"--run-dir {self.path}: {error.strerror}") from error
        if not existing.is_dir():
            kind = "a file" if existing.exists() else "a link to nothing"
            raise UsageError(
                f"--run-dir must be a directory, got {self.path}: {existing} is {kind}"
            )
        if holds_run and not resume:
            raise UsageError(
                f"--run-dir {self.path} already holds a run: add --resume to continue it, or name "
                "another directory"
            )
        for path in (existing, self.journal, self.run_json, self.lock):
            if path.exists() and not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
                raise UsageError(f"--run-dir {self.path}: cannot write to {path}")

    @property
    def is_in_use(self) -> bool | None:
        """Whether a run is using this directory now; None if this host cannot find out.

        On some shared file systems, the lock of a process on another host is not visible. Then the
        content of the lock file decides. The content names the process of the run. After a run that
        ended without a crash, it is empty.
        """
        try:
            with held_locks.guard:
                if identify_file(self.lock) in held_locks.files:
                    return True
                with self.lock.open() as file:
                    free = try_system_lock(file, shared=True)
        except FileNotFoundError:
            return False
        except OSError:
            return None
        holder = re.match(r"process (\d{1,9}) on (.*) since ", self.holder)
        if free is False or not holder:
            return free is False
        if holder[2] != socket.gethostname():
            return None
        return free is None and is_alive(int(holder[1]))

    def check_lock(self) -> bool | None:
        """Return whether a process holds the lock, or None if this host cannot find out."""
        try:
            with self.lock.open() as file:
                free = try_system_lock(file, shared=True)
        except OSError:
            return None
        return None if free is None else not free

    @property
    def holder(self) -> str:
        """Description of the process of the current run, or of one that crashed, or ""."""
        with suppress(OSError, ValueError), held_locks.guard:
            if identify_file(self.lock) not in held_locks.files:
                return make_printable(self.lock.read_text().strip()[:200])
        return ""

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Inside ``with``, keep other runs out of this directory.

        Raises UsageError if another run is using it. The message names the process of that run.

        The operating system releases the lock when the process ends. The lock file remains, but it
        locks nothing. While it is locked, its content names the process.
        """
        with self.lock.open("a+", errors="replace") as file:
            file.seek(0)
            locked = try_system_lock(file)
            for _ in range(3):
                if locked is False:  # Perhaps `is_in_use` of another process has locked it briefly.
                    time.sleep(0.1)
                    locked = try_system_lock(file)
            if locked is False:
                holder = make_printable(file.read(200).strip()) or "another run"
                raise UsageError(
                    f"{self.path} is in use by {holder}: wait for it, end it, or name another "
                    "--run-dir"
                )
            if locked is None:
                text = (
                    f"warning: {self.lock} cannot be locked: a second run in {self.path} would not "
                    "be detected"
                )
                print(text, file=sys.stderr, flush=True)
            self.previous_crashed = bool(file.read(1))
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            file.flush()
            identity = identify_file(self.lock)
            held_locks.files.add(identity)
            try:
                yield
            finally:
                held_locks.files.discard(identity)
                file.truncate(0)
                if not self.run_json.exists():  # The run could not start.
                    with suppress(OSError):
                        self.lock.unlink()
                        self.path.rmdir()  # Fails unless it is empty.
                        if self.path.parent == RUNS_DIR:
                            RUNS_DIR.rmdir()

    def mark_ended(self) -> None:
        """Record that the run ends without a crash, so that no evaluation is suspected of it."""
        with suppress(OSError):
            os.truncate(self.lock, 0)

    def locate_storage(self, storage: str) -> str:
        """Convert a storage in run.json to a URL or the absolute path of a file."""
        return storage if is_url(storage) else str(self.path.absolute() / storage)

    def remove_stale_files(self) -> None:
        """Remove files that a killed run has left: locks of the journal, and drafts of weights.

        Such a lock would block all writers for up to an hour, until the journal treats it as stale.
        """
        for lock in self.path.glob(f"{self.journal.name}.lock*"):
            lock.unlink(missing_ok=True)
        for draft in (
            *self.path.glob(f".{self.best_weights.name}.*"),
            *self.front_weights.glob(".*"),
        ):
            draft.unlink(missing_ok=True)

    def read_manifest(self) -> Manifest:
        """Return the content of run.json. Raises UsageError if it is missing or invalid."""
        try:
            content = json.loads(self.run_json.read_text())
        except FileNotFoundError:
            folder = self.path if self.path.is_dir() else self.path.parent
            runs = sorted(str(path.parent) for path in folder.glob(f"*/{self.run_json.name}"))
            known = f". These are runs: {format_list(runs)}" if runs else ""
            raise UsageError(
                f"{self.path} holds no run: there is no {self.run_json}{known}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{self.run_json} cannot be read: {error}") from error
        return parse_manifest(content, self.run_json)

    def read_summary(self) -> dict[str, Any]:
        """Return the content of summary.json; an empty dict if it is missing or cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(self.summary_json.read_text())
            return content if isinstance(content, dict) else {}
        return {}


def is_file_of_run(path: Path) -> bool:
    """Return whether a run writes the file `path`, which may be a link."""
    file = path.resolve()
    folders = [RunDir(folder) for folder in file.parents]
    return any(run.holds_run and run.owns(file.relative_to(run.path)) for run in folders)


def identify_file(path: Path) -> tuple[int, int]:
    """Return the device and the inode of a file, which other paths to it have as well."""
    status = path.stat()
    return status.st_dev, status.st_ino


def make_run_dir(name: str) -> RunDir:
    """Create the directory runs/NAME-DATE-TIME, with a number if it exists, and return it."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        with suppress(FileExistsError):
            path = RUNS_DIR / (stem + suffix)
            path.mkdir(parents=True)
            return RunDir(path)
    raise UsageError(
        f"{RUNS_DIR / stem} and 998 numbered directories of this name exist. Choose one with "
        "--run-dir"
    )


def find_existing(path: Path) -> Path:
    """Return the absolute path, or the nearest above it that exists, even as a broken link."""
    absolute = path.absolute()
    return next(one for one in [absolute, *absolute.parents] if one.exists() or one.is_symlink())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically. Raises RunError if it cannot be written."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, or the target of a link, atomically; raise RunError if that fails."""
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def try_system_lock(file: IO[Any], shared: bool = False) -> bool | None:
    """Lock an open file until it is closed or the process ends, without waiting.

    Args:
        file: File that is open for writing, or for reading if `shared`.
        shared: Whether to take a shared lock, which several processes can hold. It serves to find
            out whether another process holds a lock that is not shared.

    Returns:
        True if the file is locked now, False if another process holds the lock, and None if the
        file system has no locks.
    """
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def set_folder_aside(folder: Path) -> None:
    """Rename the folder of an evaluation that starts again, such as 7 to 7.1, unless it is empty.

    If it cannot be renamed, print a warning.
    """
    try:
        if not folder.is_dir() or not any(folder.iterdir()):
            return
        numbers = itertools.count(1)
        names = (folder.with_name(f"{folder.name}.{number}") for number in numbers)
        folder.rename(next(path for path in names if not path.exists()))
    except OSError as error:
        warn(f"warning: {folder} keeps files of an earlier attempt: {format_error(error)}")
