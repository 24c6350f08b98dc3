"""Read a run from its run directory, during or after the run, without MPI. Nothing is written.

A run has one or more sessions. A session is one start of the run.
"""

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
from hpo.results.confirmation import make_plan
from hpo.results.recommendation import find_best_by, find_winner
from hpo.results.summary import SessionOutcome, Summary
from hpo.space.parameters import is_conditional
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import Manifest
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import mask_password
from hpo.store.study import (
    check_objectives,
    convert_storage_errors,
    open_confirmations,
    open_existing_study,
)
from hpo.text_format import cut_text

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from hpo.results.advice import Advice
    from hpo.results.run_result import RunResult
    from hpo.store.record import Record


EXHAUSTED_REASON = "the search space is exhausted"


class RunReader:
    """Read access to a run. All methods return the current content of its study.

    Args:
        storage: The URL of the study's storage. Needed only if it has a password, which run.json
        does not keep.

    Attributes:
        run_dir: The run directory.
        manifest: The content of run.json.

    Raises:
        UsageError: If the directory does not contain a readable run.
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
        """The Optuna study of the run."""
        return self._record.study

    def read_evaluations(self) -> list[Evaluation]:
        """Return all evaluations, sorted by trial number."""
        return self._record.read_evaluations()

    def read_confirmations(self, all_plans: bool = False) -> list[Evaluation]:
        """Return the confirmations that the latest session planned.

        With `all_plans`, return the confirmations of all sessions.
        """
        plan = make_plan(self.manifest)
        record = open_confirmations(self._storage, self.manifest.study) if plan.count else None
        evaluations = record.read_evaluations() if record else []
        return evaluations if all_plans else plan.select_planned(evaluations)

    def find_winner(self) -> Evaluation | None:
        """Return the evaluation that the run recommends; None if no evaluation has succeeded yet."""
        return find_winner(
            self.read_evaluations(), self.read_confirmations(), self.manifest.objectives
        )

    def find_best_by(self, name: str) -> Evaluation | None:
        """Return the evaluation of the Pareto front that is best in one objective; None if none has succeeded yet.

        Raises:
            UsageError: If the run has no such objective.
        """
        return find_best_by(name, self.read_evaluations(), self.manifest.objectives)

    def find_front(self) -> list[Evaluation]:
        """Return the evaluations of the Pareto front, the lowest loss first."""
        return find_front(self.read_evaluations(), self.manifest.objectives)

    def make_summary(self, top_n: int) -> Summary:
        """Return the current summary of the run, without the times of its latest session.

        Args:
            top_n: The number of best evaluations to list.
        """
        last_summary = _read_last_summary(self.run_dir)
        session = SessionOutcome(
            last_summary.get("stopped"),
            last_summary.get("remedy"),
            bool(last_summary.get("exhausted")),
        )
        return Summary(
            self.read_evaluations(),
            self.manifest,
            top_n,
            self.read_confirmations(),
            session=session,
        )

    def read_distributions(self) -> dict[str, Any]:
        """Return the Optuna distributions of the search space; empty before the first evaluation."""
        return _collect_distributions(self._record.read_trials(), self.manifest.space)

    def find_advice(self) -> list[Advice]:
        """Return advice that follows from the current state of the run, the most urgent first."""
        from hpo.results.advice import find_advice

        return find_advice(self.make_result())

    def make_result(self) -> RunResult:
        """Return the data from which advice is derived."""
        from hpo.results.run_result import RunResult

        run_dir, last_summary = self.run_dir, _read_last_summary(self.run_dir)
        is_running = not last_summary and run_dir.is_in_use is not False
        evaluations, confirmations = self.read_evaluations(), self.read_confirmations()
        return RunResult(
            run_dir.path,
            self.manifest,
            evaluations,
            confirmations,
            self.read_distributions(),
            parse_session_start(self.manifest),
            last_summary,
            is_running,
            self._record.read_broken_workers(parse_session_start(self.manifest)),
        )

    def make_follower(self) -> RunFollower:
        """Return a follower, which reads the run repeatedly and each time reads only the changes."""
        return RunFollower(self.run_dir, self._storage, self._record)


def _collect_distributions(trials: Sequence[FrozenTrial], space: Iterable[str]) -> dict[str, Any]:
    """Return the distribution of each parameter in `space`, from the first trial that has this parameter."""
    found: dict[str, Any] = {}
    for trial in trials:
        found = {**trial.distributions, **found}
        if len(found) >= len(list(space)):
            break
    return {name: found[name] for name in space if name in found}


def _check_trials(trials: Sequence[FrozenTrial], space: Mapping[str, Any], storage: str) -> None:
    """Raise a UsageError unless all trials have the same search space, with the parameters in `space`."""
    distributions = _collect_distributions(trials, space)
    for trial in trials:
        for name in dict.fromkeys([*trial.params, *space]):
            may_be_missing = name in space and is_conditional(str(space[name]))
            if name not in trial.params and may_be_missing:
                continue
            if name not in space or not _has_valid_param(trial, name, distributions):
                found = (
                    f"{trial.params[name]!r} of {trial.distributions[name]}"
                    if name in trial.params
                    else "missing"
                )
                raise UsageError(
                    f"{mask_password(storage)}: trial {trial.number} is not of this run's search space: parameter "
                    f"{name!r} is {cut_text(found)}"
                )


def _has_valid_param(trial: FrozenTrial, name: str, distributions: Mapping[str, Any]) -> bool:
    value, distribution = trial.params.get(name), distributions.get(name)
    own = trial.distributions.get(name)
    if own is None or distribution is None:
        return False
    # Comparing the attributes first is five times as fast as Optuna's comparison.
    if (type(own), vars(own)) != (type(distribution), vars(distribution)) and own != distribution:
        return False
    if type(value) not in (bool, int, float, str):
        return False
    choices = getattr(distribution, "choices", None)
    return (
        value in choices
        if choices is not None
        else bool(distribution.low <= value <= distribution.high)
    )


@dataclass(frozen=True)
class RunSnapshot:
    """The state of a run at one moment."""

    taken_at: float
    """The time of the snapshot, in seconds since the epoch."""
    manifest: Manifest
    """The content of run.json."""
    evaluations: list[Evaluation]
    """All evaluations of the search."""
    confirmations: list[Evaluation]
    """The confirmations that the latest session planned."""
    is_in_use: bool | None
    """Whether a process runs this run; None if this host cannot find out."""
    holder: str = ""
    """The process that runs this run, or ran it before it crashed."""
    stop_reason: str = ""
    """The reason why the run stopped before it was complete; empty if it did not."""
    remedy: str = ""
    """The command-line option that is needed to resume the run; empty if none is needed."""


class RunFollower:
    """Read a run repeatedly. Evaluations that have ended are read only once.

    `RunReader.make_follower` makes it.
    """

    def __init__(self, run_dir: RunDir, storage: str, record: Record) -> None:
        self._run_dir = run_dir
        self._storage = storage
        self._search = record
        self._confirmations: Record | None = None

    def take_snapshot(self) -> RunSnapshot:
        """Return the current state of the run.

        Raises:
            UsageError: If the run cannot be read any more.
        """
        # Read first: if the run has ended by now, its record is complete.
        in_use = self._run_dir.is_in_use
        # Read again: a session that resumes the run rewrites it.
        manifest = self._run_dir.read_manifest()
        plan = make_plan(manifest)
        with convert_storage_errors(self._storage):
            evaluations = self._search.read_evaluations()
            confirmations = (
                plan.select_planned(self._read_confirmations(manifest)) if plan.count else []
            )
        stop = ("", "") if in_use else self._read_stop_reason()
        return RunSnapshot(
            time.time(), manifest, evaluations, confirmations, in_use, self._run_dir.holder, *stop
        )

    def _read_confirmations(self, manifest: Manifest) -> list[Evaluation]:
        if self._confirmations is None:
            record = self._search.open_sibling(manifest.confirmation_study)
            if record is None or record.read_attributes().get("confirms") != manifest.study:
                return []
            self._confirmations = record
        return self._confirmations.read_evaluations()

    def _read_stop_reason(self) -> tuple[str, str]:
        summary = _read_last_summary(self._run_dir)
        exhausted = EXHAUSTED_REASON if summary.get("exhausted") else ""
        return str(summary.get("stopped") or exhausted), str(summary.get("remedy") or "")


def _read_last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Return summary.json of the latest session; empty if the session is still running or has crashed."""
    with suppress(OSError):
        if run_dir.summary_json.stat().st_mtime >= run_dir.run_json.stat().st_mtime:
            return run_dir.read_summary()
    return {}


def parse_session_start(run: Manifest) -> float:
    """Return the start of the latest session in seconds since the epoch.

    Return minus infinity if run.json has no valid start.
    """
    try:
        return datetime.strptime(run.started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return -math.inf
