"""A run on disk as its readers see it, while it goes on or afterwards: no MPI, and nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UsageError
from hpo.results.confirmation import plan_of
from hpo.results.summary import summarize
from hpo.results.winner import winner_of
from hpo.store.run_dir import RunDir
from hpo.store.study import CONFIRMATIONS, confirmations_of, existing_study, mistakes
from hpo.store.trials import Evaluation
from hpo.store.url import without_password
from hpo.text import short

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from hpo.results.advice.result import Advice
    from hpo.store.record import Record


class RunReader:
    """The run in a directory: `about` is its run.json, and what the methods give is as the record has it now.

    Raises UsageError where there is no run, or none that can be read; `storage` is needed where it has a password.
    """

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.run_dir = RunDir(path)
        self.about: dict[str, Any] = self.run_dir.read()
        self._located = self.run_dir.locate(storage or self.about["storage"])
        self._record = existing_study(self.run_dir, self._located, self.about["study"])
        _check_trials(self._record.study.get_trials(deepcopy=False), self.about["space"], self._located)

    @property
    def study(self) -> optuna.Study:
        """The study, for Optuna's own analyses."""
        return self._record.study

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations in the order in which they were started."""
        return self._record.evaluations()

    @property
    def confirming_study(self) -> str:
        """The name of the study that holds the confirmations."""
        return str(self.about["study"]) + CONFIRMATIONS

    def confirmations(self, all_plans: bool = False) -> list[Evaluation]:
        """Return the evaluations that confirm the best: those that the run's last session planned, or all of them."""
        plan = plan_of(self.about["confirm"], self.about["seed"], self.about["settings"])
        record = confirmations_of(self.run_dir, self._located, self.about["study"]) if plan.count else None
        evaluations = record.evaluations() if record else []
        return evaluations if all_plans else plan.of(evaluations)

    def winner(self) -> Evaluation | None:
        """Return the evaluation that the run recommends; None while nothing has succeeded."""
        return winner_of(self.evaluations(), self.confirmations())

    def summary(self, top_n: int) -> dict[str, Any]:
        """Summarise the run as it stands: summary.json without the times."""
        return summarize(self.evaluations(), self.about["budget"], top_n, self.confirmations())

    def distributions(self) -> dict[str, Any]:
        """Return the Optuna distributions of the search space; empty before the first evaluation."""
        trials = self.study.get_trials(deepcopy=False)
        return next((dict(trial.distributions) for trial in trials if trial.distributions), {})

    def advice(self) -> list[Advice]:
        """Return what follows from the run as it stands."""
        from hpo.results.advice.result import Result
        from hpo.results.advice.rules import advice_on

        run_dir, ended = self.run_dir, _last_summary(self.run_dir)
        goes_on = not ended and run_dir.in_use is not False
        evaluations, confirmations = self.evaluations(), self.confirmations()
        since = session_start(self.about)
        return advice_on(
            Result(run_dir.path, self.about, evaluations, confirmations, self.distributions(), since, ended, goes_on)
        )

    def follow(self) -> Follower:
        """Read the run again and again, each time at the cost of what is new."""
        return Follower(self.run_dir, self._located, self._record)


def _check_trials(trials: Sequence[FrozenTrial], space: Mapping[str, Any], storage: str) -> None:
    """Raise a UsageError unless trials are of one search space, whose parameters have these names."""
    distributions = next((trial.distributions for trial in trials if trial.distributions), {})
    for trial in trials:
        for name in [*trial.params, *space]:
            if name not in space or not _fits(trial, name, distributions):
                there = f"{trial.params[name]!r} of {trial.distributions[name]}" if name in trial.params else "missing"
                raise UsageError(
                    f"{without_password(storage)}: trial {trial.number} is not of this run's search space: parameter "
                    f"{name!r} is {short(there)}"
                )


def _fits(trial: FrozenTrial, name: str, distributions: Mapping[str, Any]) -> bool:
    """Tell whether a trial has a parameter of these distributions."""
    value, distribution = trial.params.get(name), distributions.get(name)
    if distribution is None or trial.distributions.get(name) != distribution:
        return False
    if type(value) not in (bool, int, float, str):
        return False
    choices = getattr(distribution, "choices", None)
    return value in choices if choices is not None else bool(distribution.low <= value <= distribution.high)


@dataclass(frozen=True)
class Look:
    """What there was of a run at a moment.

    `about` is its run.json; `in_use` tells whether it goes on, None where this cannot be told from this host, and
    `holder` who is or was at it; `stopped` is why it has ended by itself before it was done, if it has.
    """

    at: float
    about: dict[str, Any]
    evaluations: list[Evaluation]
    confirmations: list[Evaluation]
    in_use: bool | None
    holder: str = ""
    stopped: str = ""


class Follower:
    """Looks at a run; what has ended is converted once. Made by `RunReader.follow`."""

    def __init__(self, run_dir: RunDir, located: str, record: Record) -> None:
        self._run_dir = run_dir
        self._located = located
        self._search = _Known(record)
        self._confirmations: _Known | None = None

    def look(self) -> Look:
        """Read what is new. Raises UsageError where the run cannot be read any more."""
        in_use = self._run_dir.in_use  # first: what has ended by then is in the record
        about = self._run_dir.read()  # anew: a session that resumes the run writes another one
        plan = plan_of(about["confirm"], about["seed"], about["settings"])
        with mistakes(self._located):
            evaluations = self._search.read()
            confirmations = plan.of(self._confirming(about["study"])) if plan.count else []
        stopped = "" if in_use else self._stopped()
        return Look(time.time(), about, evaluations, confirmations, in_use, self._run_dir.holder, stopped)

    def _confirming(self, study_name: str) -> list[Evaluation]:
        if self._confirmations is None:
            record = self._search.record.beside(study_name + CONFIRMATIONS)
            if record is None or record.about().get("confirms") != study_name:
                return []
            self._confirmations = _Known(record)
        return self._confirmations.read()

    def _stopped(self) -> str:
        """Return the reason in the last session's summary.json."""
        summary = _last_summary(self._run_dir)
        exhausted = "the search space is exhausted" if summary.get("exhausted") else ""
        return str(summary.get("stopped") or exhausted)


def _last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Return what summary.json holds of the last session; nothing where that has not ended by itself."""
    with suppress(OSError):
        if run_dir.summary_json.stat().st_mtime >= run_dir.run_json.stat().st_mtime:
            return run_dir.summary()
    return {}


def session_start(about: Mapping[str, Any]) -> float:
    """Return when the last session began, to the second; minus infinity if run.json does not say it."""
    try:
        return datetime.strptime(about["started"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return -math.inf


class _Known:
    """All evaluations of a record, of which only those are read again that can have changed."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._evaluations: dict[int, Evaluation] = {}

    def read(self) -> list[Evaluation]:
        for evaluation in (*self.record.news(), *self.record.running()):
            self._evaluations[evaluation.trial] = evaluation
        return list(self._evaluations.values())
