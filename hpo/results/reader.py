"""A run on disk as its readers see it, while it goes on or afterwards: no MPI, and nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UsageError
from hpo.parameters import is_conditional
from hpo.results.confirmation import plan_of
from hpo.results.summary import summarize
from hpo.results.winner import best_by, winner_of
from hpo.store.evaluations import Evaluation
from hpo.store.front import front
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.store.study import check_objectives, confirmations_of, existing_study, mistakes
from hpo.store.url import without_password
from hpo.text import short

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from hpo.results.advice.result import Advice, Result
    from hpo.store.record import Record


EXHAUSTED = "the search space is exhausted"


class RunReader:
    """The run in a directory: `manifest` is its run.json, and the methods return what the record holds now.

    `storage`, the study's URL, is needed where that has a password. Raises UsageError where there is no run, or none
    that can be read.
    """

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.run_dir = RunDir(path)
        self.manifest = self.run_dir.manifest()
        self._located = self.run_dir.locate(storage or self.manifest.storage)
        self._record = existing_study(self.run_dir, self._located, self.manifest.study)
        check_objectives(self._record, self.manifest, self.run_dir)
        _check_trials(self._record.trials(), self.manifest.space, self._located)

    @property
    def study(self) -> optuna.Study:
        """The study, for Optuna's own analyses."""
        return self._record.study

    def evaluations(self) -> list[Evaluation]:
        """Return all evaluations in the order in which they were started."""
        return self._record.evaluations()

    def confirmations(self, all_plans: bool = False) -> list[Evaluation]:
        """Return the evaluations that confirm the best: those that the run's last session planned, or all of them."""
        plan = plan_of(self.manifest)
        record = confirmations_of(self._located, self.manifest.study) if plan.count else None
        evaluations = record.evaluations() if record else []
        return evaluations if all_plans else plan.of(evaluations)

    def winner(self) -> Evaluation | None:
        """Return the evaluation that the run recommends; None while nothing has succeeded."""
        return winner_of(self.evaluations(), self.confirmations(), self.manifest.objectives)

    def best_by(self, name: str) -> Evaluation | None:
        """Return the evaluation of the front that is best in one objective; raises UsageError without such one."""
        return best_by(name, self.evaluations(), self.manifest.objectives)

    def front(self) -> list[Evaluation]:
        """Return the evaluations that no other one dominates, those with the lowest loss first."""
        return front(self.evaluations(), self.manifest.objectives)

    def summary(self, top_n: int) -> dict[str, Any]:
        """Return a summary of the run as it stands: summary.json without the times."""
        end = _last_summary(self.run_dir)
        return {
            **summarize(self.evaluations(), self.manifest, top_n, self.confirmations()),
            "stopped": end.get("stopped"),
            "remedy": end.get("remedy"),
            "exhausted": bool(end.get("exhausted")),
        }

    def distributions(self) -> dict[str, Any]:
        """Return the Optuna distributions of the search space; empty before the first evaluation."""
        return _distributions(self._record.trials(), self.manifest.space)

    def advice(self) -> list[Advice]:
        """Return what follows from the run as it stands."""
        from hpo.results.advice.rules import advice_on

        return advice_on(self.result())

    def result(self) -> Result:
        """Return what advice is worked out from."""
        from hpo.results.advice.result import Result

        run_dir, ended = self.run_dir, _last_summary(self.run_dir)
        goes_on = not ended and run_dir.in_use is not False
        evaluations, confirmations = self.evaluations(), self.confirmations()
        since = session_start(self.manifest)
        return Result(
            run_dir.path, self.manifest, evaluations, confirmations, self.distributions(), since, ended, goes_on
        )

    def follow(self) -> Follower:
        """Return a follower, which reads the run again and again, each time only what is new."""
        return Follower(self.run_dir, self._located, self._record)


def _distributions(trials: Sequence[FrozenTrial], space: Iterable[str]) -> dict[str, Any]:
    """Return the distributions of a space's parameters, each as the first trial in which it exists has it."""
    found: dict[str, Any] = {}
    for trial in trials:
        found = {**trial.distributions, **found}
        if len(found) >= len(list(space)):
            break
    return {name: found[name] for name in space if name in found}


def _check_trials(trials: Sequence[FrozenTrial], space: Mapping[str, Any], storage: str) -> None:
    """Raise a UsageError unless trials are of one search space, whose parameters have these names."""
    distributions = _distributions(trials, space)
    for trial in trials:
        for name in dict.fromkeys([*trial.params, *space]):
            may_be_missing = name in space and is_conditional(str(space[name]))
            if name not in trial.params and may_be_missing:
                continue
            if name not in space or not _fits(trial, name, distributions):
                there = f"{trial.params[name]!r} of {trial.distributions[name]}" if name in trial.params else "missing"
                raise UsageError(
                    f"{without_password(storage)}: trial {trial.number} is not of this run's search space: parameter "
                    f"{name!r} is {short(there)}"
                )


def _fits(trial: FrozenTrial, name: str, distributions: Mapping[str, Any]) -> bool:
    """Tell whether a trial has a parameter of these distributions."""
    value, distribution = trial.params.get(name), distributions.get(name)
    own = trial.distributions.get(name)
    if own is None or distribution is None:
        return False
    # Optuna's comparison takes five times as long as that of the attributes.
    if (type(own), vars(own)) != (type(distribution), vars(distribution)) and own != distribution:
        return False
    if type(value) not in (bool, int, float, str):
        return False
    choices = getattr(distribution, "choices", None)
    return value in choices if choices is not None else bool(distribution.low <= value <= distribution.high)


@dataclass(frozen=True)
class Look:
    """A run as it was at a moment, `at`, in seconds since the epoch.

    `manifest` is its run.json. `in_use` tells whether the run goes on, None where this cannot be told from this host,
    and `holder` which process runs it, or did when it died. `stopped` is why the run has ended by itself before it was
    done, empty if it has not, and `remedy` the option that a resumed run needs.
    """

    at: float
    manifest: Manifest
    evaluations: list[Evaluation]
    confirmations: list[Evaluation]
    in_use: bool | None
    holder: str = ""
    stopped: str = ""
    remedy: str = ""


class Follower:
    """Looks at a run again and again; an ended evaluation is read only once. Made by `RunReader.follow`."""

    def __init__(self, run_dir: RunDir, located: str, record: Record) -> None:
        self._run_dir = run_dir
        self._located = located
        self._search = _Known(record)
        self._confirmations: _Known | None = None

    def look(self) -> Look:
        """Return the run as it is now; raises UsageError where it cannot be read any more."""
        in_use = self._run_dir.in_use  # first: if the run has ended by now, all of it is in the record
        manifest = self._run_dir.manifest()  # again: a session that resumes the run writes another one
        plan = plan_of(manifest)
        with mistakes(self._located):
            evaluations = self._search.read()
            confirmations = plan.of(self._confirming(manifest)) if plan.count else []
        stopped = ("", "") if in_use else self._stopped()
        return Look(time.time(), manifest, evaluations, confirmations, in_use, self._run_dir.holder, *stopped)

    def _confirming(self, manifest: Manifest) -> list[Evaluation]:
        if self._confirmations is None:
            record = self._search.record.beside(manifest.confirming_study)
            if record is None or record.about().get("confirms") != manifest.study:
                return []
            self._confirmations = _Known(record)
        return self._confirmations.read()

    def _stopped(self) -> tuple[str, str]:
        """Return the reason and the remedy in the last session's summary.json."""
        summary = _last_summary(self._run_dir)
        exhausted = EXHAUSTED if summary.get("exhausted") else ""
        return str(summary.get("stopped") or exhausted), str(summary.get("remedy") or "")


def _last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Return what summary.json holds of the last session; nothing where that has not ended by itself."""
    with suppress(OSError):
        if run_dir.summary_json.stat().st_mtime >= run_dir.run_json.stat().st_mtime:
            return run_dir.summary()
    return {}


def session_start(run: Manifest) -> float:
    """Return when the last session began, to the second; minus infinity if run.json does not say it."""
    try:
        return datetime.strptime(run.started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return -math.inf


class _Known:
    """All evaluations of a record; only those that can have changed are read again."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._evaluations: dict[int, Evaluation] = {}

    def read(self) -> list[Evaluation]:
        for evaluation in (*self.record.news(), *self.record.running()):
            self._evaluations[evaluation.trial] = evaluation
        return list(self._evaluations.values())
