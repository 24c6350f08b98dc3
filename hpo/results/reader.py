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
from hpo.results.confirmation import make_plan
from hpo.results.recommendation import find_best_by, find_winner
from hpo.results.summary import summarize
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import Manifest
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import mask_password
from hpo.store.study import check_objectives, convert_storage_errors, open_confirmations, open_existing_study
from hpo.text_format import cut_text

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from hpo.results.advice.run_result import Advice, RunResult
    from hpo.store.record import Record


EXHAUSTED_REASON = "the search space is exhausted"


class RunReader:
    """The run in a directory: `manifest` is its run.json, and the methods return what the record holds now.

    `storage`, the study's URL, is needed where that has a password. Raises UsageError where there is no run, or none
    that can be read.
    """

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.run_dir = RunDir(path)
        self.manifest = self.run_dir.read_manifest()
        self._storage = self.run_dir.locate_storage(storage or self.manifest.storage)
        self._record = open_existing_study(self.run_dir, self._storage, self.manifest.study)
        check_objectives(self._record, self.manifest, self.run_dir)
        _check_trials(self._record.read_trials(), self.manifest.space, self._storage)

    @property
    def study(self) -> optuna.Study:
        """The study, for Optuna's own analyses."""
        return self._record.study

    def read_evaluations(self) -> list[Evaluation]:
        """Return all evaluations in the order in which they were started."""
        return self._record.read_evaluations()

    def read_confirmations(self, all_plans: bool = False) -> list[Evaluation]:
        """Return the evaluations that confirm the best: those that the run's last session planned, or all of them."""
        plan = make_plan(self.manifest)
        record = open_confirmations(self._storage, self.manifest.study) if plan.count else None
        evaluations = record.read_evaluations() if record else []
        return evaluations if all_plans else plan.select_planned(evaluations)

    def find_winner(self) -> Evaluation | None:
        """Return the evaluation that the run recommends; None while nothing has succeeded."""
        return find_winner(self.read_evaluations(), self.read_confirmations(), self.manifest.objectives)

    def find_best_by(self, name: str) -> Evaluation | None:
        """Return the evaluation of the front that is best in one objective; raises UsageError without such one."""
        return find_best_by(name, self.read_evaluations(), self.manifest.objectives)

    def find_front(self) -> list[Evaluation]:
        """Return the evaluations that no other one dominates, those with the lowest loss first."""
        return find_front(self.read_evaluations(), self.manifest.objectives)

    def make_summary(self, top_n: int) -> dict[str, Any]:
        """Return a summary of the run as it stands: summary.json without the times."""
        end = _read_last_summary(self.run_dir)
        return {
            **summarize(self.read_evaluations(), self.manifest, top_n, self.read_confirmations()),
            "stopped": end.get("stopped"),
            "remedy": end.get("remedy"),
            "exhausted": bool(end.get("exhausted")),
        }

    def read_distributions(self) -> dict[str, Any]:
        """Return the Optuna distributions of the search space; empty before the first evaluation."""
        return _collect_distributions(self._record.read_trials(), self.manifest.space)

    def find_advice(self) -> list[Advice]:
        """Return what follows from the run as it stands."""
        from hpo.results.advice.advisor import find_advice

        return find_advice(self.make_result())

    def make_result(self) -> RunResult:
        """Return what advice is worked out from."""
        from hpo.results.advice.run_result import RunResult

        run_dir, ended = self.run_dir, _read_last_summary(self.run_dir)
        goes_on = not ended and run_dir.is_in_use is not False
        evaluations, confirmations = self.read_evaluations(), self.read_confirmations()
        since = parse_session_start(self.manifest)
        return RunResult(
            run_dir.path, self.manifest, evaluations, confirmations, self.read_distributions(), since, ended, goes_on
        )

    def make_follower(self) -> RunFollower:
        """Return a follower, which reads the run again and again, each time only what is new."""
        return RunFollower(self.run_dir, self._storage, self._record)


def _collect_distributions(trials: Sequence[FrozenTrial], space: Iterable[str]) -> dict[str, Any]:
    """Return the distributions of a space's parameters, each as the first trial in which it exists has it."""
    found: dict[str, Any] = {}
    for trial in trials:
        found = {**trial.distributions, **found}
        if len(found) >= len(list(space)):
            break
    return {name: found[name] for name in space if name in found}


def _check_trials(trials: Sequence[FrozenTrial], space: Mapping[str, Any], storage: str) -> None:
    """Raise a UsageError unless trials are of one search space, whose parameters have these names."""
    distributions = _collect_distributions(trials, space)
    for trial in trials:
        for name in dict.fromkeys([*trial.params, *space]):
            may_be_missing = name in space and is_conditional(str(space[name]))
            if name not in trial.params and may_be_missing:
                continue
            if name not in space or not _has_valid_param(trial, name, distributions):
                there = f"{trial.params[name]!r} of {trial.distributions[name]}" if name in trial.params else "missing"
                raise UsageError(
                    f"{mask_password(storage)}: trial {trial.number} is not of this run's search space: parameter "
                    f"{name!r} is {cut_text(there)}"
                )


def _has_valid_param(trial: FrozenTrial, name: str, distributions: Mapping[str, Any]) -> bool:
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
class RunSnapshot:
    """A run as it was at a moment, `at`, in seconds since the epoch.

    `manifest` is its run.json. `in_use` tells whether the run goes on, None where this cannot be told from this host,
    and `holder` which process runs it, or did when it died. `stopped` is why the run has ended by itself before it was
    done, empty if it has not, and `remedy` the option that a resumed run needs.
    """

    taken_at: float
    manifest: Manifest
    evaluations: list[Evaluation]
    confirmations: list[Evaluation]
    is_in_use: bool | None
    holder: str = ""
    stop_reason: str = ""
    remedy: str = ""


class RunFollower:
    """Looks at a run again and again; an ended evaluation is read only once. Made by `RunReader.make_follower`."""

    def __init__(self, run_dir: RunDir, storage: str, record: Record) -> None:
        self._run_dir = run_dir
        self._storage = storage
        self._search = _EvaluationCache(record)
        self._confirmations: _EvaluationCache | None = None

    def take_snapshot(self) -> RunSnapshot:
        """Return the run as it is now; raises UsageError where it cannot be read any more."""
        in_use = self._run_dir.is_in_use  # first: if the run has ended by now, all of it is in the record
        manifest = self._run_dir.read_manifest()  # again: a session that resumes the run writes another one
        plan = make_plan(manifest)
        with convert_storage_errors(self._storage):
            evaluations = self._search.read()
            confirmations = plan.select_planned(self._read_confirmations(manifest)) if plan.count else []
        stopped = ("", "") if in_use else self._read_stop_reason()
        return RunSnapshot(time.time(), manifest, evaluations, confirmations, in_use, self._run_dir.holder, *stopped)

    def _read_confirmations(self, manifest: Manifest) -> list[Evaluation]:
        if self._confirmations is None:
            record = self._search.record.open_sibling(manifest.confirmation_study)
            if record is None or record.read_attributes().get("confirms") != manifest.study:
                return []
            self._confirmations = _EvaluationCache(record)
        return self._confirmations.read()

    def _read_stop_reason(self) -> tuple[str, str]:
        """Return the reason and the remedy in the last session's summary.json."""
        summary = _read_last_summary(self._run_dir)
        exhausted = EXHAUSTED_REASON if summary.get("exhausted") else ""
        return str(summary.get("stopped") or exhausted), str(summary.get("remedy") or "")


def _read_last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Return what summary.json holds of the last session; nothing where that has not ended by itself."""
    with suppress(OSError):
        if run_dir.summary_json.stat().st_mtime >= run_dir.run_json.stat().st_mtime:
            return run_dir.read_summary()
    return {}


def parse_session_start(run: Manifest) -> float:
    """Return when the last session began, to the second; minus infinity if run.json does not say it."""
    try:
        return datetime.strptime(run.started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return -math.inf


class _EvaluationCache:
    """All evaluations of a record; only those that can have changed are read again."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._evaluations: dict[int, Evaluation] = {}

    def read(self) -> list[Evaluation]:
        for evaluation in (*self.record.read_changes(), *self.record.read_running()):
            self._evaluations[evaluation.trial] = evaluation
        return list(self._evaluations.values())
