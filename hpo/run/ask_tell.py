"""Search with evaluations that the caller runs (`hpo.Search`), without MPI.

Several processes may evaluate individuals of the same run, such as the tasks of a job array. A
process changes the record only while it excludes the others (`hpo.store.evaluation_locks`).
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
import traceback
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.breeding.propagators import make_following_propagator
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.objectives import LOSS, parse_objectives, parse_report
from hpo.options import (
    OPTIONS,
    PROPAGATORS_WITHOUT_MPI,
    Options,
    is_valid_json,
    read_kept_options,
    to_json,
)
from hpo.problem import SearchDescription
from hpo.process.failure import format_with_hint
from hpo.run.request import check_space
from hpo.run.source_versions import keep_source
from hpo.space import SearchSpace, Value
from hpo.space.parameters import describe_priors, format_parameter
from hpo.store.evaluation_locks import open_evaluation_locks
from hpo.store.manifest import Manifest
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, held_locks, write_json
from hpo.store.storage import FileStorage
from hpo.store.study import convert_storage_errors, create_study
from hpo.store.study_writer import Claims
from hpo.text_format import make_printable
from hpo.versions import read_versions

if TYPE_CHECKING:
    from hpo.breeding.propagators import Propagator
    from hpo.store.evaluations import Assignment
    from hpo.views.run import Run

_STALE_LOCK_SECONDS = 10  # Of another program, such as Optuna's dashboard, that has ended.


@dataclass(frozen=True, eq=False)
class Trial:
    """An individual to evaluate, which `Search.ask` returns."""

    number: int
    """The number of the evaluation in the run."""
    params: Mapping[str, Value]
    """The hyperparameters."""
    _key: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same trial, or copies of it from other processes."""
        return isinstance(other, Trial) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Search:
    """A search whose evaluations you run yourself: in a notebook, a program or a job array.

    Several processes may open the same run directory at the same time, on all hosts that share its
    file system. If a process ends before it has told the result of a trial, another process
    evaluates this trial again. To resume a run, open its directory again.

    Args:
        space: The search space. All processes must give the same.
        run_dir: The directory of the run, which is created if it does not exist.
        evaluations: The number of evaluations. Default: as before in this run, at first 64.
        propagator: "ga", "tpe" or "random". Default: as before in this run, at first "ga".
        seed: The seed of breeding. Default: as before in this run, at first 0.
        objectives: The objectives as in a search file: "loss", or `maximize` of a metric, and
            further metrics.

    Raises:
        ValueError: An argument is not valid, or the directory holds another run.

    Example:
        ::

            space = hpo.SearchSpace(lr=hpo.Float(1e-4, 1e-1, log=True), layers=hpo.Int(1, 4))
            search = hpo.Search(space, "runs/first", evaluations=50)
            while trial := search.ask():
                search.tell(trial, train(**trial.params))
            search.run.best
    """

    def __init__(
        self,
        space: SearchSpace,
        run_dir: str | os.PathLike[str],
        *,
        evaluations: int | None = None,
        propagator: str | None = None,
        seed: int | None = None,
        objectives: Sequence[Any] = (LOSS,),
    ) -> None:
        if not isinstance(space, SearchSpace):
            raise UsageError(f"space must be a SearchSpace, got {space!r}")
        check_space((), space)
        self._space = space
        try:
            self._objectives, self._score = parse_objectives(objectives)
        except ValueError as error:
            raise UsageError(str(error)) from None
        given = _check_options(evaluations, propagator, seed)
        # A notebook may change its directory.
        self._run_dir = RunDir(Path(run_dir).expanduser().absolute())
        self._run_dir.check_usable(resume=True)
        try:
            self._run_dir.path.mkdir(parents=True, exist_ok=True)
            locks = open_evaluation_locks(self._run_dir)
        except OSError as error:
            raise UsageError(f"{self._run_dir.path} cannot be used: {error.strerror}") from error
        with locks.exclude_others():
            self._manifest = self._open_run(given)
        self._join()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._run_dir.path)!r})"

    @property
    def run(self) -> Run:
        """The run, as `load_run` returns it."""
        from hpo.views.run import load_run

        return load_run(self._run_dir.path)

    def ask(self) -> Trial | None:
        """Return the next individual to evaluate; None if the search has no further one.

        None does not mean that all evaluations have ended: other processes may still run some.
        """
        if self._manifest.propagators[0] == "ga":
            import_module("hpo.breeding.surrogate")  # It takes time, which others need not wait.
        self._enter_process()
        trial: Trial | None = None
        try:
            with self._change():
                self._requeue_lost()
                propagator = self._prepare_propagator()
                propagator.history.update()
                individual = propagator.ask()
                is_new = not propagator.history.is_known(individual.params)
                attributes = self._make_attributes()
                assignment = self._claims.claim(individual.params if is_new else None, **attributes)
                if assignment is None:
                    return None
                self._locks.hold(assignment.number)
                trial = Trial(assignment.number, dict(assignment.params))
                self._running[trial.number] = _Running(trial, assignment, time.monotonic())
        except BaseException:
            if trial is not None:  # It may have been recorded, and is then evaluated later.
                del self._running[trial.number]
                self._locks.abandon([trial.number])
            raise
        return trial

    def tell(self, trial: Trial, loss: Any, /, **metrics: Any) -> None:
        """Record the result of a trial, durably. The trial fails if its loss is not finite.

        Args:
            trial: A trial that this search has returned.
            loss: The validation loss, lower is better: a number, a numpy number, or a tensor with
                one element. It is the score if the first objective is maximised.
            **metrics: Other numbers by name. They are recorded, and may be objectives.

        Raises:
            TypeError: The loss or a metric is not a number.
            ValueError: An objective is missing, or the trial has ended.
        """
        self._enter_process()
        running = self._find_running(trial)
        if LOSS in metrics:
            raise UsageError(f"no metric must be named {LOSS!r}: it is the second argument")
        try:
            number, numbers = parse_report(loss, metrics)
        except ValueError as error:
            self.fail(trial, str(error))
            return
        given = number
        if self._score:
            numbers = {**numbers, self._score: number}
            number = -number
        for name in self._objectives.find_missing(numbers):
            if name in metrics:
                self.fail(trial, f"the objective {make_printable(name)} is {metrics[name]}")
                return
            raise UsageError(
                f"{name!r} is an objective, and must be given: search.tell(trial, {given:g}, "
                f"{make_printable(name)}=...)"
            )
        with self._end(running):
            self._record.report(running.assignment, 1, number)
            self._record.complete(running.assignment, number, running.seconds, numbers)

    def fail(self, trial: Trial, reason: str | BaseException) -> None:
        """Record that a trial has failed: the search avoids its neighbourhood.

        Raises:
            ValueError: The trial has ended.
        """
        self._enter_process()
        running = self._find_running(trial)
        stack = ""
        if isinstance(reason, BaseException):
            stack = "".join(traceback.format_exception(reason))
            reason = f"{type(reason).__name__}: {format_with_hint(reason, has_worker=False)}"
        with self._end(running):
            line = " ".join(str(reason).split())
            self._record.fail(running.assignment, line, stack, running.seconds)

    # The run

    def _open_run(self, given: Mapping[str, Any]) -> Manifest:
        """Begin a run, or join the run in the directory. Its lock must be held."""
        run_dir = self._run_dir
        before = run_dir.read_manifest() if run_dir.run_json.exists() else None
        kept = {}
        if before is not None:
            self._check_joinable(before)
            kept = read_kept_options(before.sessions[-1].options)
        options = Options(Path(), **{**kept, "ranks_per_worker": 1, "islands": 1, **given})
        if before is not None and before.sessions[-1].options == to_json(options):
            return before
        manifest = self._make_manifest(options, before)
        if before is None:
            create_study(run_dir, str(run_dir.journal), manifest)
        write_json(run_dir.run_json, manifest.to_json())
        return manifest

    def _check_joinable(self, before: Manifest) -> None:
        path = self._run_dir.path
        if before.search_space:
            raise UsageError(
                f"{path} holds a run of {before.search_space}: name another directory, or continue "
                "it with hpo search --resume"
            )
        if difference := before.find_difference(self._space.describe()):
            raise UsageError(f"{path} holds a run of another search space: {difference}")
        if before.objectives != self._objectives:
            raise UsageError(
                f"{path} holds a run with other objectives: they were "
                f"{', '.join(before.objectives.describe())}, and are "
                f"{', '.join(self._objectives.describe())}"
            )

    def _make_manifest(self, options: Options, before: Manifest | None) -> Manifest:
        started = datetime.now().astimezone().isoformat(timespec="microseconds")
        layout = Layout(ranks=1, ranks_per_worker=1, islands=1)
        source = _format_source(self._space)
        here = Path.cwd() / "space.py"  # Finds the repository from which the caller runs.
        search = SearchDescription(here, here, source, self._space, self._objectives)
        earlier = before.sessions if before else ()
        entry = replace(
            keep_source(self._run_dir, search, earlier, started),
            options=to_json(options),
            layout=str(layout),
        )
        return Manifest(
            space=self._space.describe(),
            priors=describe_priors(self._space.parameters),
            layout=layout,
            hosts=(socket.gethostname(),),
            versions=read_versions(),
            started=started,
            settings={},
            set={},
            budget=options.evaluations,
            seed=options.seed,
            propagators=options.propagators,
            pruner=options.pruner,
            confirm_seeds=0,
            objectives=self._objectives,
            storage=self._run_dir.journal.name,
            study=self._run_dir.study_name,
            sessions=(*earlier, entry),
        )

    def _enter_process(self) -> None:
        """Join the run again if this process was forked: it has none of the locks and trials."""
        with held_locks.guard:
            if os.getpid() != self._pid:
                self._join()

    def _join(self) -> None:
        """Open the locks and the record in this process."""
        self._locks = open_evaluation_locks(self._run_dir)
        self._running: dict[int, _Running] = {}
        # Trials of an abandoned search are evaluated again.
        weakref.finalize(self, self._locks.abandon, self._running)
        self._open_record()
        self._pid = os.getpid()

    def _open_record(self) -> None:
        journal = self._run_dir.journal
        if not journal.is_file():
            raise UsageError(f"{journal}, the study of this run, is missing: restore it")
        with convert_storage_errors(str(journal)):
            self._storage = FileStorage(journal, _STALE_LOCK_SECONDS)
            self._record = Record(self._storage, self._manifest.study)
        distributions = self._space.make_distributions()
        self._claims = Claims(self._record, distributions, self._manifest.budget)
        self._propagator: Propagator | None = None
        self._is_damaged = False

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Inside ``with``, exclude other processes, and collect changes of the record."""
        with self._locks.exclude_others():
            if self._is_damaged:
                self._open_record()
            self._record.read_trials()  # A batch reads nothing before its first change.
            try:
                with self._storage.journal.batch_writes():
                    yield
            except BaseException:
                self._is_damaged = True  # It may have changes that are not on disk.
                raise

    def _requeue_lost(self) -> None:
        """Let the trials be evaluated again whose processes have ended. Call it inside `_change`.

        The first time, the process may have ended for any reason, such as its time limit. If its
        retry ends in the same way, the trial is suspected of it.
        """
        trials = self._record.read_trials()
        for evaluation in self._record.read_evaluations():
            trial = evaluation.trial
            if evaluation.state == "running" and not self._locks.is_held(trial):
                is_repeated = evaluation.retry_of is not None
                crashed = is_repeated and not self._locks.is_abandoned(trial)
                self._record.requeue_trial(trials[trial], crashed)

    # The individuals

    def _prepare_propagator(self) -> Propagator:
        """Return the propagator of this process. Call it inside `_change`."""
        if self._propagator is None:
            run = self._manifest
            if self._space.priors and not self._record.read_trials():
                self._enqueue_priors()
            evaluations = self._record.read_evaluations()
            started = sum(each.state != "waiting" for each in evaluations)
            # No other process has these numbers when it asks for its first trial.
            seed = f"{run.seed}/{len(evaluations)}/{started}"
            changes = self._record.follow()
            self._propagator = make_following_propagator(
                run.propagators[0], self._space, self._objectives, seed, changes.read
            )
        return self._propagator

    def _enqueue_priors(self) -> None:
        params = self._space.draw_priors(random.Random(f"{self._manifest.seed}/priors"))
        self._record.enqueue(params, self._space.make_distributions(), propagator="priors")

    def _make_attributes(self) -> dict[str, Any]:
        """Return the attributes of the next evaluation. Its worker is one that runs none."""
        evaluations = self._record.read_evaluations()
        busy = {each.worker for each in evaluations if each.state == "running"}
        worker = next(number for number in itertools.count() if number not in busy)
        return {
            "island": 0,
            "worker": worker,
            "generation": sum(each.worker == worker for each in evaluations),
            "propagator": self._manifest.propagators[0],
            "seed": self._manifest.seed,
            "hosts": {socket.gethostname(): 1},
        }

    def _find_running(self, trial: Trial) -> _Running:
        if not isinstance(trial, Trial):
            hint = ". ask() returns None at the end of the search" if trial is None else ""
            raise TypeError(f"trial must be a trial that ask() has returned, got {trial!r}{hint}")
        running = self._running.get(trial.number)
        if running is None or running.trial != trial:
            raise UsageError(
                f"trial {trial.number} is not running in this search: its result was told already, "
                "or another search or process has asked for it"
            )
        return running

    @contextmanager
    def _end(self, running: _Running) -> Iterator[None]:
        """Inside ``with``, record the end of a trial."""
        number = running.trial.number
        with self._change():
            state = self._record.read_evaluations()[number].state
            if state == "running":
                yield
        del self._running[number]
        self._locks.release([number])
        if state != "running":  # The file system has lost the locks of this process.
            raise UsageError(f"trial {number} is {state} in {self._run_dir.path}")


@dataclass(frozen=True)
class _Running:
    """A trial that this process evaluates."""

    trial: Trial
    assignment: Assignment
    started: float
    """By `time.monotonic`."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def _check_options(
    evaluations: int | None, propagator: str | None, seed: int | None
) -> dict[str, Any]:
    """Return the options that are given, by the names of `hpo.options`."""
    for name, value in (("evaluations", evaluations), ("seed", seed)):
        if value is not None and not is_valid_json(name, value):
            raise UsageError(
                f"{name} must be a whole number, {OPTIONS[name].kind.limits}, got {value!r}"
            )
    if propagator is not None and propagator not in PROPAGATORS_WITHOUT_MPI:
        names = ", ".join(map(repr, PROPAGATORS_WITHOUT_MPI))
        raise UsageError(f"propagator must be one of {names}, got {propagator!r}")
    propagators = None if propagator is None else (propagator,)
    options = {"evaluations": evaluations, "seed": seed, "propagators": propagators}
    return {name: value for name, value in options.items() if value is not None}


def _format_source(space: SearchSpace) -> bytes:
    """Return a search space as the content of a Python file."""
    lines = [
        "from hpo import Categorical, Float, Int, Ordinal, SearchSpace",
        "",
        "space = SearchSpace(",
    ]
    lines += [f"    {name}={format_parameter(each)}," for name, each in space.parameters.items()]
    lines += [")", *(f"# Constraint: {make_printable(text)}" for text in space.constraint_texts)]
    return ("\n".join(lines) + "\n").encode(errors="backslashreplace")
