"""Run directories: what a run leaves on disk, and what it needs to know to be resumed."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpo.errors import RunError, UsageError
from hpo.process.leaving import is_alive
from hpo.store.manifest import Manifest, manifest_of
from hpo.store.system_lock import try_system_lock
from hpo.store.url import is_remote
from hpo.text import printable

RUNS = Path("runs")
_held: set[tuple[int, int]] = set()  # the locks of this process: it would lose one that it opens and closes to look


class RunDir:
    """A directory that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "study.log"
        self.claims = path / "claims"
        self.run_json = path / "run.json"
        self.summary_json = path / "summary.json"
        self.weights = path / "best.safetensors"
        self.test_json = path / "test.json"
        self.report_html = path / "report.html"
        self.lock = path / "lock"
        self.died = False  # whether the run that was here before this one has

    @property
    def study_name(self) -> str:
        """The name of the run's study in its storage."""
        return self.path.absolute().name

    def printed(self, trial: int, confirms: bool = False) -> Path:
        """Name the file of what was printed in an evaluation of the search, or of its confirmation."""
        return self.path / "printed" / f"{'confirm-' if confirms else ''}{trial}.txt"

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.run_json.exists() or self.journal.exists()

    def check(self, resume: bool) -> None:
        """Raise a UsageError unless a run can start here, or go on here."""
        try:
            holds_run = self.holds_run
            existing = next(place for place in [self.path.absolute(), *self.path.absolute().parents] if place.exists())
        except OSError as error:
            raise UsageError(f"--run-dir {self.path}: {error.strerror}") from error
        if not existing.is_dir():
            raise UsageError(f"--run-dir {self.path}: {existing} is a file, not a directory")
        if holds_run and not resume:
            raise UsageError(
                f"--run-dir {self.path} already holds a run: add --resume to go on with it, or name another directory"
            )
        for path in (existing, self.journal, self.run_json, self.lock):
            if path.exists() and not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
                raise UsageError(f"--run-dir {self.path}: cannot write to {path}")

    @property
    def in_use(self) -> bool | None:
        """Whether a run is in this directory now; None where that cannot be told from this host.

        A lock that another host holds is not seen on every shared file system. A run that has ended by itself has left
        the file that shows who had it empty.
        """
        try:
            if _identity(self.lock) in _held:
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

    @property
    def holder(self) -> str:
        """Who is in this directory, or was when it died."""
        with suppress(OSError, ValueError):
            return printable(self.lock.read_text().strip()[:200])
        return ""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs out of this directory; UsageError, saying who it is, where one is in it.

        The lock is the system's, which takes it back from a process that dies, and not the file that shows who has it.
        """
        with self.lock.open("a+", errors="replace") as file:
            file.seek(0)
            if (locked := _lock(file)) is False:
                holder = printable(file.read(200).strip()) or "another run"
                raise UsageError(f"{self.path} is in use by {holder}: wait for it, end it, or name another --run-dir")
            if locked is None:
                text = f"warning: {self.lock} cannot be locked: a second run in {self.path} would not be noticed"
                print(text, file=sys.stderr, flush=True)
            self.died = bool(file.read(1))
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            file.flush()
            identity = _identity(self.lock)
            _held.add(identity)
            try:
                yield
            finally:
                _held.discard(identity)
                file.truncate(0)
                if not self.run_json.exists():
                    self._leave_nothing()

    def sign_off(self) -> None:
        """Say that a run ends by itself, so that what runs is not taken for what it has died of."""
        with suppress(OSError):
            os.truncate(self.lock, 0)

    def _leave_nothing(self) -> None:
        """Remove the lock of a run that could not be begun, and the directory if it is empty then."""
        with suppress(OSError):
            self.lock.unlink()
            self.path.rmdir()
            if self.path.parent == RUNS:
                RUNS.rmdir()

    def locate(self, storage: str) -> str:
        """Return the storage that run.json names: a URL, or a file in this directory, wherever it has been moved to."""
        return storage if is_remote(storage) else str(self.path.absolute() / storage)

    def clear_locks(self) -> None:
        """Remove what a killed run may have left: locks, which would be waited for until they are stale, and drafts."""
        for path in (self.journal, self.claims, self.weights):
            for lock in (path.with_name(path.name + ".lock"), *self.path.glob(f"{path.name}.lock.*")):
                lock.unlink(missing_ok=True)
        for draft in self.path.glob(f".{self.weights.name}.*"):
            draft.unlink(missing_ok=True)

    def manifest(self) -> Manifest:
        """Read run.json; raises UsageError where it is missing or is not what a run has written."""
        try:
            content = json.loads(self.run_json.read_text())
        except FileNotFoundError:
            raise UsageError(f"{self.path} holds no run: there is no {self.run_json}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{self.run_json} cannot be read: {error}") from error
        return manifest_of(content, self.run_json)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json holds; nothing where there is none, or somebody has edited it."""
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(self.summary_json.read_text())
            return content if isinstance(content, dict) else {}
        return {}


def _identity(path: Path) -> tuple[int, int]:
    """Tell a file from others, whatever its name."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _lock(file: IO[str]) -> bool | None:
    """Lock a file; one that asks whether a run is there (`in_use`) has it for a moment too."""
    for _ in range(3):
        if (locked := try_system_lock(file)) is not False:
            return locked
        time.sleep(0.1)
    return try_system_lock(file)


def fresh_run_dir(name: str) -> RunDir:
    """Make runs/NAME-DATE-TIME, with a number behind it where two runs start in the same second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        with suppress(FileExistsError):
            path = RUNS / (stem + suffix)
            path.mkdir(parents=True)
            return RunDir(path)
    raise UsageError(f"{RUNS / stem} and 998 others of its name exist; give --run-dir")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all; RunError where that cannot be done."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, the one that a link leads to; RunError where that cannot be done."""
    file_of_link = Path(os.path.realpath(path))
    draft = file_of_link.with_name(f".{file_of_link.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(file_of_link)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
