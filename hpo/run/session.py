"""A session of a run: what its first rank finds on disk, checks, and leaves there for the session after a death."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hpo.breeding.names import DEFAULT_PROPAGATORS
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.problem import SearchFile
from hpo.process.printed import warn
from hpo.results.confirmation import Plan, plan_of
from hpo.run.given import read_given
from hpo.run.inheritance import differences, misfit, read_inheritance, take_over
from hpo.run.options import DEFAULT_EVALUATIONS, DEFAULT_PRUNER, Options
from hpo.run.source import changes, keep
from hpo.space import SearchSpace
from hpo.store.journal import is_begun
from hpo.store.outage import Patience
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, fresh_run_dir, write_json
from hpo.store.storage import studies
from hpo.store.study import CONFIRMATIONS, confirmations_of, existing_study, is_missing, mistakes, open_study
from hpo.store.url import from_anywhere, is_hidden, is_remote, without_password
from hpo.text import counted

_PACKAGES = ("hpo-islands", "propulate", "mpi4py", "torch", "torchvision", "optuna", "scikit-learn")


@dataclass(frozen=True)
class Session:
    """Where the run's record is, and what all ranks need to know of the run; `headline` says it to a person.

    With `patience`, a record that is away is waited for.
    """

    run_dir: RunDir
    storage: str
    study_name: str
    budget: int
    seed: int
    propagators: tuple[str, ...]
    pruner: str
    plan: Plan
    settings: dict[str, Any]
    headline: str
    patience: Patience | None = None

    def open_record(self) -> Record:
        """Open the record; each process and thread needs one of its own."""
        return Record(self.storage, self.study_name, self.run_dir.claims, self.patience)

    def open_confirmations(self) -> Record:
        """Open the record of what confirms the best, which `create_confirmations` has made."""
        return Record(self.storage, self.study_name + CONFIRMATIONS, self.run_dir.claims, self.patience)

    def has_confirmations(self) -> bool:
        """Tell whether `create_confirmations` has been here."""
        return self.study_name + CONFIRMATIONS in studies(self.storage, self.patience)

    def create_confirmations(self, space: SearchSpace) -> None:
        """Make the study of what confirms the best, unless it is there."""
        name = self.study_name + CONFIRMATIONS
        if not self.has_confirmations() or "space" not in self.open_confirmations().about():
            Record.create(self.storage, name, self.run_dir.claims, space.describe(), confirms=self.study_name)


def previous(options: Options, search: SearchFile) -> dict[str, Any]:
    """Read the run.json of the run to resume, empty if there is none; UsageError if it is of another search space."""
    if not options.resume or options.run_dir is None or not RunDir(options.run_dir).run_json.exists():
        return {}
    run_dir = RunDir(options.run_dir)
    content = run_dir.read()
    before, now = content["space"], search.space.describe()
    _check_settings(content["set"], options, search, run_dir)
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"--resume: the run in {run_dir.path} has another search space: parameter {name!r} was "
                f"{before.get(name, 'not in it')}, and is {now.get(name, 'not in it')} in {search.path}"
            )
    return content


def _check_settings(before: Mapping[str, str], options: Options, search: SearchFile, run_dir: RunDir) -> None:
    """Raise a UsageError where the search space file takes no more what was set in earlier sessions."""
    here = {assignment.split("=", 1)[0] for assignment in options.settings}
    try:
        for name, text in before.items():
            if name not in here:
                search.check_setting(f"{name}={text}")
    except UsageError as error:
        raise UsageError(
            f"--resume: {error}; an earlier session was given it: change it in 'set' of {run_dir.run_json}, or what "
            f"{search.path} takes"
        ) from error


def enter(options: Options, search: SearchFile, held: ExitStack) -> RunDir:
    """Make or find the run directory, and keep other runs out of it for as long as `held` is open."""
    run_dir = RunDir(options.run_dir) if options.run_dir else fresh_run_dir(search.path.stem)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        held.enter_context(run_dir.hold())
    except OSError as error:
        place = error.filename or run_dir.path
        raise UsageError(f"--run-dir {run_dir.path}: {place} cannot be used: {error.strerror}") from error
    run_dir.check(options.resume)  # another run may have been there since
    return run_dir


def begin(
    run_dir: RunDir,
    options: Options,
    layout: Layout,
    search: SearchFile,
    settings: Any,
    before: Mapping[str, Any],
    hosts: Sequence[str],
) -> Session:
    """Make the run's study, or take up the one that `before`, an earlier run.json, describes; needs `enter` first."""
    values = _values(settings)
    session = _session(run_dir, options, layout, values, before)
    if before and is_remote(session.storage) and not is_missing(session.storage):
        with mistakes(session.storage):
            Patience(without_password(session.storage), warn).call(partial(studies, session.storage))
    inheritance = read_inheritance(options.start_from, search.space) if options.start_from is not None else None
    given = read_given(options.start_with, search.space, session.seed) if options.start_with is not None else []
    if session.plan.count:
        confirmations_of(run_dir, session.storage, session.study_name)  # or say that it is not this run's
    taken_up = _take_up(session, search) if before else _create(session, search)
    sessions = before.get("sessions", [])
    this = keep(run_dir, search, sessions, time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    lines = [
        f"{search.path.stem}: {session.budget} evaluations on {layout}, {counted(len(hosts), 'host')}; "
        f"{', '.join(session.propagators[: layout.islands])}; seed {session.seed}",
        f"in {run_dir.path}{taken_up}",
        *changes(run_dir, search, sessions, this),
        *differences(before.get("settings", {}), "before", values, "now"),
    ]
    source = inheritance.source if inheritance is not None else before.get("start_from")
    content = {
        **_how(search, layout, hosts),
        "started": this["started"],
        "settings": values,
        "set": dict(assignment.split("=", 1) for assignment in options.assignments(before)),
        "budget": session.budget,
        "seed": session.seed,
        "propagators": list(session.propagators),
        "pruner": session.pruner,
        "confirm": session.plan.count,
        "start_from": source,
        "storage": without_password(_storage(options, before, run_dir)),
        "study": session.study_name,
        "sessions": [*sessions, this],
        "command": shlex.join(_without_passwords(sys.argv, options.storage, options.start_from)),
    }
    with mistakes(session.storage):
        write_json(run_dir.run_json, content)
        record = session.open_record()
        if inheritance is not None:
            lines += take_over(inheritance, record, search.space, layout, values)
        elif source is not None and source not in record.about().get("taken_over", []):
            lines.append(f"only a part of {source} was taken over: give --start-from again for the rest")
        _give(record, given, search.space)
    return dataclasses.replace(session, headline="\n".join(lines))


def _session(
    run_dir: RunDir, options: Options, layout: Layout, values: Mapping[str, Any], before: Mapping[str, Any]
) -> Session:
    """Decide what the options leave open: as it was before, or the default."""
    storage = _storage(options, before, run_dir)
    if is_hidden(storage):
        raise UsageError(f"{run_dir.path} keeps its study in {storage}: give --storage URL again, with the password")
    seed = options.seed if options.seed is not None else before.get("seed", 0)
    confirm = options.confirm if options.confirm is not None else before.get("confirm", 0)
    return Session(
        run_dir,
        run_dir.locate(storage),
        before.get("study", run_dir.study_name),
        options.budget(layout.workers) or before.get("budget", DEFAULT_EVALUATIONS),
        seed,
        options.propagators or tuple(before.get("propagators", DEFAULT_PROPAGATORS)),
        options.pruner if options.pruner is not None else before.get("pruner", DEFAULT_PRUNER),
        plan_of(confirm, seed, values),
        dict(values),
        headline="",
    )


def _storage(options: Options, before: Mapping[str, Any], run_dir: RunDir) -> str:
    storage: str = options.storage or before.get("storage", run_dir.journal.name)
    return from_anywhere(storage)


def _how(search: SearchFile, layout: Layout, hosts: Sequence[str]) -> dict[str, Any]:
    """Say what is run, where and with what."""
    return {
        "search_space": str(search.path),
        "space": search.space.describe(),
        "layout": dataclasses.asdict(layout),
        "hosts": list(hosts),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in _PACKAGES}},
    }


def _create(session: Session, search: SearchFile) -> str:
    """Make the study of a new run, unless a session that was killed before it wrote run.json has made it."""
    run_dir, space = session.run_dir, search.space.describe()
    run_dir.clear_locks()
    record = open_study(run_dir, session.storage, session.study_name)
    if record is None and not is_begun(run_dir.journal):
        raise UsageError(f"{run_dir.journal} is not the study of a run: name another --run-dir")
    if record is None or not (record.about().get("space") or record.evaluations()):
        with mistakes(session.storage):
            Record.create(session.storage, session.study_name, run_dir.claims, space)
    elif record.evaluations() or record.about().get("space") != space:
        missing = f"{run_dir.run_json} is missing; restore it, or " if run_dir.journal.exists() else ""
        raise UsageError(
            f"{without_password(session.storage)} already holds a study named {session.study_name!r}: {missing}"
            "name another --run-dir, since a study has the name of its run directory"
        )
    return ""


def _take_up(session: Session, search: SearchFile) -> str:
    """Prepare the record of an earlier session for going on, and say what is in it."""
    run_dir = session.run_dir
    run_dir.clear_locks()
    record = existing_study(run_dir, session.storage, session.study_name)
    if record.about().get("space") != search.space.describe():
        raise UsageError(
            f"the study {session.study_name!r} in {without_password(session.storage)} is of another search space than "
            f"{run_dir.run_json} says: one of them is not this run's"
        )
    _check_trials(record, session.storage, search.space)
    with mistakes(session.storage):
        record.requeue_interrupted(run_dir.died)
        confirmations = open_study(run_dir, session.storage, session.study_name + CONFIRMATIONS)
        if confirmations and confirmations.about().get("confirms") == session.study_name:
            confirmations.requeue_interrupted(run_dir.died)
    own = [evaluation for evaluation in record.evaluations() if not evaluation.origin]
    waiting = [evaluation for evaluation in own if evaluation.state == "waiting"]
    finished = sum(evaluation.state not in ("waiting", "interrupted") for evaluation in own)
    late = sum(evaluation.deaths > 1 for evaluation in waiting)
    soon = len(waiting) - late
    first = f"; {soon} that wait will be evaluated first" if soon else ""
    last = f"; {late} that may have killed the job twice, alone at the end" if late else ""
    return f": going on after {counted(finished, 'evaluation')}{first}{last}"


def _check_trials(record: Record, storage: str, space: SearchSpace) -> None:
    """Raise a UsageError unless all trials are of a search space: what breeds learns from them."""
    for evaluation in record.evaluations():
        problem = misfit(evaluation, space)
        if problem is not None:
            raise UsageError(f"{without_password(storage)}: {problem}")


def _give(record: Record, given: Sequence[Mapping[str, Any]], space: SearchSpace) -> None:
    """Let hyperparameters wait to be evaluated, as far as they are new to the run."""
    known = [evaluation.params for evaluation in record.evaluations()] if given else []
    for params in given:
        if params not in known:
            record.enqueue(params, space.distributions(), propagator="--start-with")


def _without_passwords(arguments: Sequence[str], *storages: str | None) -> list[str]:
    for storage in filter(None, storages):
        arguments = [argument.replace(storage, without_password(storage)) for argument in arguments]
    return list(arguments)


def _values(settings: Any) -> dict[str, Any]:
    """Return settings as JSON can hold them."""
    values = dataclasses.asdict(settings) if settings is not None else {}
    return {n: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for n, v in values.items()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
