"""Run directories: what a run leaves on disk, and what it needs to know to be resumed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpo.errors import UsageError

RUNS = Path("runs")


class RunDir:
    """A directory that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "study.log"
        self.claims = path / "claims"
        self.run_json = path / "run.json"
        self.summary_json = path / "summary.json"

    @property
    def study_name(self) -> str:
        """The name of the run's study in its storage."""
        return self.path.absolute().name

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
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UsageError(f"--run-dir {self.path}: cannot write to {existing}")

    def remove_if_empty(self) -> None:
        """Remove the directory of a run that could not be begun."""
        with suppress(OSError):
            self.path.rmdir()
            if self.path.parent == RUNS:
                RUNS.rmdir()

    def locate(self, storage: str) -> str:
        """Give the storage that run.json names: a URL, or a file in this directory, wherever it has been moved to."""
        return storage if "://" in storage else str(self.path.absolute() / storage)

    def clear_locks(self) -> None:
        """Remove the locks that a killed run may have left, which would be waited for until they are stale."""
        for path in (self.journal, self.claims):
            path.with_name(path.name + ".lock").unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        """Read run.json; raises UsageError where it is missing or is not what a run has written."""
        try:
            content = json.loads(self.run_json.read_text())
        except FileNotFoundError:
            raise UsageError(f"{self.path} holds no run: there is no {self.run_json}") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.run_json} cannot be read: {error}") from error
        expected = {
            "space": dict,
            "budget": int,
            "seed": int,
            "settings": dict,
            "set": dict,
            "storage": str,
            "study": str,
        }
        for key, kind in expected.items():
            if not isinstance(content, dict) or not isinstance(content.get(key), kind):
                raise UsageError(f"{self.run_json} was not written by a run: it has no {kind.__name__} {key!r}")
        return dict(content)


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
    """Write a JSON file whole or not at all."""
    text = json.dumps(content, indent=2)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
