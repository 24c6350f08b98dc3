"""Read a run from its run directory, during or after the run, without MPI. Nothing is written.

A session is one start of the run. A run has one or more sessions.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.errors import UsageError
from hpo.objectives import LOSS
from hpo.results.confirmation import make_plan
from hpo.results.recommendation import find_winner
from hpo.results.run_snapshot import RunSnapshot
from hpo.results.summary import SessionOutcome, Summary
from hpo.space.parameters import is_conditional
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import parse_start
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.store.storage_url import mask_password
from hpo.store.study import (
    check_objectives,
    convert_storage_errors,
    open_existing_study,
)
from hpo.text_format import cut_text, make_printable

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from hpo.results.advice import Advice
    from hpo.store.record import Record


class RunReader:
    """Read access to a run. All methods return the current content of its study.

    Evaluations that have ended are read only once, so methods can be called repeatedly. `storage`
    is needed only if its URL has a password, which run.json does not keep.

    Raises:
        UsageError: If the directory does not contain a readable run.
    """

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.run_dir = RunDir(path)
        self.manifest = self.run_dir.read_manifest()
        self._storage = self.run_dir.locate_storage(storage or self.manifest.storage)
        self._record = open_existing_study(self.run_dir, self._storage, self.manifest.study)
        self._confirmations: Record | None = None
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
        if not plan.count and not all_plans:
            return []
        if self._confirmations is None:
            with convert_storage_errors(self._storage):
                record = self._record.open_sibling(self.manifest.confirmation_study)
                # The study of this name may belong to another run.
                found = record.read_attributes().get("confirms") if record is not None else None
                if found == self.manifest.study:
                    self._confirmations = record
        evaluations = self._confirmations.read_evaluations() if self._confirmations else []
        return evaluations if all_plans else plan.select_planned(evaluations)

    def find_winner(self) -> Evaluation | None:
        """Return the evaluation that the run recommends; None if none has succeeded yet."""
        return find_winner(
            self.read_evaluations(), self.read_confirmations(), self.manifest.objectives
        )

    def find_best_by(self, name: str) -> Evaluation | None:
        """Return the evaluation of the front that is best in one objective, then in the loss."""
        objectives = self.manifest.objectives
        if name not in objectives.names:
            condition = f"{LOSS}, the only objective of this run"
            if objectives.is_multi_objective:
                names = ", ".join(map(make_printable, objectives.names))
                condition = f"an objective of this run ({names})"
            close = difflib.get_close_matches(name, objectives.names, n=1)
            hint = f". Did you mean {close[0]}?" if close else ""
            if any(name in evaluation.metrics for evaluation in self.find_front()):
                hint = f". A first objective that is maximised is the {LOSS}, with a minus sign"
            raise UsageError(f"--by must be {condition}, got {make_printable(name)}{hint}")
        index = objectives.names.index(name)
        return min(
            self.find_front(),
            key=lambda evaluation: objectives.compute_costs(evaluation.values)[index],
            default=None,
        )

    def find_front(self) -> list[Evaluation]:
        """Return the evaluations of the Pareto front, the lowest loss first."""
        return find_front(self.read_evaluations(), self.manifest.objectives)

    def make_summary(self, top_n: int, ask_models: bool = True) -> Summary:
        """Return the current summary of the run, without the times of its latest session."""
        last = self._read_last_summary()
        session = SessionOutcome(
            last.get("stopped"), last.get("remedy"), bool(last.get("exhausted"))
        )
        evaluations = self.read_evaluations()
        confirmations = self.read_confirmations(all_plans=True)
        split = make_plan(self.manifest).split_planned(confirmations)
        return Summary(evaluations, self.manifest, top_n, *split, ask_models, session=session)

    def read_distributions(self) -> dict[str, Any]:
        """Return Optuna's distribution of each parameter; empty before the first evaluation."""
        return _collect_distributions(self._record.read_trials(), self.manifest.space)

    def find_advice(self) -> list[Advice]:
        """Return advice that follows from the current state of the run, the most urgent first."""
        from hpo.results.advice import find_advice

        return find_advice(self.take_snapshot(for_advice=True))

    def take_snapshot(self, for_advice: bool = False) -> RunSnapshot:
        """Return the current state of the run, with all that advice needs if `for_advice`."""
        # Read first: if the run has ended by now, its record is complete.
        is_in_use = self.run_dir.is_in_use
        # Read again: a session that resumes the run rewrites it.
        self.manifest = self.run_dir.read_manifest()
        with convert_storage_errors(self._storage):
            evaluations = self.read_evaluations()
            confirmations = self.read_confirmations()
        snapshot = RunSnapshot(
            time.time(),
            self.manifest,
            evaluations,
            confirmations,
            is_in_use,
            self.run_dir.holder,
            self._read_last_summary(),
            self.run_dir.path,
        )
        if not for_advice:
            return snapshot
        left = self._record.read_broken_workers(parse_start(self.manifest.started))
        return replace(snapshot, distributions=self.read_distributions(), broken_workers=left)

    def _read_last_summary(self) -> dict[str, Any]:
        """Return summary.json of the latest session; empty if it still runs or has crashed."""
        with suppress(OSError):
            written_at = self.run_dir.summary_json.stat().st_mtime
            if written_at >= self.run_dir.run_json.stat().st_mtime:
                return self.run_dir.read_summary()
        return {}


def _collect_distributions(trials: Sequence[FrozenTrial], space: Iterable[str]) -> dict[str, Any]:
    """Return the distribution of each parameter, from the first trial that has this parameter."""
    found: dict[str, Any] = {}
    for trial in trials:
        found = {**trial.distributions, **found}
        if len(found) >= len(list(space)):
            break
    return {name: found[name] for name in space if name in found}


def _check_trials(trials: Sequence[FrozenTrial], space: Mapping[str, Any], storage: str) -> None:
    """Raise a UsageError unless all trials have the parameters and distributions of `space`."""
    distributions = _collect_distributions(trials, space)
    conditional = {name for name in space if is_conditional(str(space[name]))}
    for trial in trials:
        for name in dict.fromkeys([*trial.params, *space]):
            if name not in trial.params and name in conditional:
                continue
            if name in space and _has_valid_param(trial, name, distributions):
                continue
            found = "missing"
            if name in trial.params:
                found = f"{trial.params[name]!r} of {trial.distributions[name]}"
            raise UsageError(
                f"{mask_password(storage)}: trial {trial.number} is not of this run's search "
                f"space: parameter {name!r} is {cut_text(found)}"
            )


def _has_valid_param(trial: FrozenTrial, name: str, distributions: Mapping[str, Any]) -> bool:
    value = trial.params.get(name)
    distribution = distributions.get(name)
    own = trial.distributions.get(name)
    if own is None or distribution is None:
        return False
    # Comparing the attributes first is five times as fast as Optuna's comparison.
    if (type(own), vars(own)) != (type(distribution), vars(distribution)) and own != distribution:
        return False
    if type(value) not in (bool, int, float, str):
        return False
    if hasattr(distribution, "choices"):
        return value in distribution.choices
    return bool(distribution.low <= value <= distribution.high)
