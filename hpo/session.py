"""A session of a run: what its first rank finds on disk, checks, and leaves there for the session after a death."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import DEFAULT_EVALUATIONS, Options
from hpo.record import Record, repair_journal, without_password
from hpo.run_dir import RunDir, fresh_run_dir, write_json
from hpo.search_file import SearchFile
from hpo.summary import summarize

_PACKAGES = ("hpo-islands", "propulate", "mpi4py", "torch", "torchvision", "optuna", "scikit-learn")


@dataclass(frozen=True)
class Session:
    """Where the run's record is, and what all ranks need to know of the run; `headline` says it to a person."""

    run_dir: RunDir
    storage: str
    study_name: str
    budget: int
    seed: int
    headline: str

    def open_record(self) -> Record:
        """Open the record; each process and thread needs one of its own."""
        return Record(self.storage, self.study_name, self.run_dir.claims)


def previous(options: Options, search: SearchFile) -> dict[str, Any]:
    """Read the run.json of the run to resume, empty if there is none; UsageError if it is of another search space."""
    if not options.resume or options.run_dir is None or not RunDir(options.run_dir).holds_run:
        return {}
    run_dir = RunDir(options.run_dir)
    content = run_dir.read()
    before, now = content["space"], search.space.describe()
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"--resume: the run in {run_dir.path} has another search space: parameter {name!r} was "
                f"{before.get(name, 'not in it')}, and is {now.get(name, 'not in it')} in {search.path}"
            )
    return content


def begin(
    options: Options, layout: Layout, search: SearchFile, settings: Any, before: Mapping[str, Any], hosts: int
) -> Session:
    """Make the run directory and its study, or take up those that `before`, an earlier run.json, describes."""
    run_dir = RunDir(options.run_dir) if options.run_dir else fresh_run_dir(search.path.stem)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir.path}: cannot be made: {error.strerror}") from error
    storage = options.storage or before.get("storage", str(run_dir.journal.absolute()))
    study_name = before.get("study", run_dir.study_name)
    if "***" in storage:
        raise UsageError(f"{run_dir.path} keeps its study in {storage}: give --storage URL again, with the password")
    budget = options.budget(layout.workers) or before.get("budget", DEFAULT_EVALUATIONS)
    seed = options.seed if options.seed is not None else before.get("seed", 0)
    values = dataclasses.asdict(settings) if settings is not None else {}
    content = {
        "search_space": str(search.path),
        "space": search.space.describe(),
        "settings": values,
        "set": [*before.get("set", []), *options.settings],
        "budget": budget,
        "seed": seed,
        "storage": without_password(storage),
        "study": study_name,
        "layout": dataclasses.asdict(layout),
        "hosts": hosts,
        "first_host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
    }
    write_json(run_dir.run_json, content)
    headline = [
        f"{search.path.stem}: {budget} evaluations on {layout}, {hosts} host{'s' if hosts > 1 else ''}; seed {seed}",
        f"in {run_dir.path}" + (f": {_resumed(run_dir, storage, study_name)}" if before else ""),
    ]
    if not before:
        _create(storage, study_name, run_dir, search)
    for name, value in before.get("settings", {}).items():
        if name in values and values[name] != value:
            headline.append(f"{name} was {value} before, and is {values[name]} now: losses may not compare")
    return Session(run_dir, storage, study_name, budget, seed, "\n".join(headline))


def look(path: Path, top_n: int) -> dict[str, Any]:
    """Summarise the run in a directory as it stands, running or finished."""
    run_dir = RunDir(path)
    content = run_dir.read()
    try:
        record = Record(content["storage"], content["study"], run_dir.claims)
    except KeyError:
        raise UsageError(f"{path}: there is no study {content['study']!r} in {content['storage']}") from None
    return summarize(record.evaluations(), content["budget"], top_n)


def _create(storage: str, study_name: str, run_dir: RunDir, search: SearchFile) -> None:
    try:
        Record.create(storage, study_name, run_dir.claims, search.space.describe())
    except ValueError as error:
        raise UsageError(f"{error}; name another --run-dir, since a study has the name of its run directory") from error


def _resumed(run_dir: RunDir, storage: str, study_name: str) -> str:
    """Prepare the record for going on, and say what is in it."""
    run_dir.clear_locks()
    if run_dir.journal.exists():
        repair_journal(run_dir.journal)
    record = Record(storage, study_name, run_dir.claims)
    record.requeue_interrupted()
    states = [evaluation.state for evaluation in record.evaluations()]
    finished = len(states) - states.count("waiting") - states.count("interrupted")
    again = f"; {states.count('waiting')} interrupted will be evaluated again, first" if "waiting" in states else ""
    return f"going on after {finished} evaluations{again}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
