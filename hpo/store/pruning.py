"""Pruners by the names that they have on the command line: Optuna's, and those that pause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Union

from optuna.pruners import BasePruner, MedianPruner, PercentilePruner

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import Evaluation, group_by_individual
from hpo.store.successive_halving import HALVING_SCHEDULES, HalvingSchedule, SuccessiveHalving
from hpo.text_format import format_count

if TYPE_CHECKING:
    from hpo.store.evaluations import Assignment
    from hpo.store.record import Record


@dataclass(frozen=True)
class PruningDecision:
    """What a pruner makes of an evaluation: its `state` is going, pruned or paused.

    What is paused `may_be_promoted` in this run. Those that `eliminated` are paused, and no longer may: their first
    trials.
    """

    state: str
    may_be_promoted: bool = False
    eliminated: Sequence[int] = ()


@dataclass(frozen=True)
class StoppingPruner:
    """Stops what one of Optuna's pruners says is hopeless, after any epoch."""

    pruner: BasePruner

    def decide_pruning(self, record: Record, assignment: Assignment, *_: object) -> PruningDecision:
        """Judge an evaluation by its losses in the record, and by those of the others."""
        return PruningDecision("pruned" if record.should_prune(assignment, self.pruner) else "going")


@dataclass(frozen=True)
class PausingPruner:
    """Pauses at rungs what is not among the best of one search; `budget` and `objectives` are those of the run.

    With several objectives, the best are chosen by dominance.
    """

    halving: HalvingSchedule
    budget: int
    objectives: Objectives = ONLY_LOSS

    @cached_property
    def _successive_halving(self) -> SuccessiveHalving:
        return SuccessiveHalving(self.halving, self.objectives)

    def decide_pruning(
        self, record: Record, assignment: Assignment, epochs: int, values: Sequence[float] = ()
    ) -> PruningDecision:
        """Judge an evaluation by its losses in the record after so many epochs, and by those of the others.

        With several objectives, `values` are those of its lowest loss so far, which are recorded.
        """
        if not self.halving.has_rung(assignment.root, epochs):
            return PruningDecision("going")
        if self.objectives.is_multi_objective:
            record.record_rung_values(assignment, epochs, values)
        rung = self._successive_halving.update(record.read_evaluations()).find_rung(
            self.halving.find_bracket(assignment.root), epochs
        )
        if rung is None or not rung.is_effective:
            return PruningDecision("going")  # it is near its end
        last = self.halving.count_promoted(self.budget)
        out = [root for root in rung.ranking.find_behind(last) if root in rung.paused]
        may_go_on = not rung.ranking.is_behind(assignment.root, last)
        return PruningDecision("going" if rung.is_promoted(assignment.root) else "paused", may_go_on, out)


Pruner = Union[StoppingPruner, PausingPruner]


def make_pruner(name: str, budget: int, objectives: Objectives = ONLY_LOSS) -> Pruner | None:
    """Return the pruner of this name for a run of so many evaluations; None for the name "none".

    Raises UsageError where no pruner has the name.
    """
    if percentile := re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", name):
        if 0 < float(percentile[1]) < 100:
            return StoppingPruner(PercentilePruner(float(percentile[1])))
    elif name in ("none", "median"):
        return StoppingPruner(MedianPruner()) if name == "median" else None
    elif name in HALVING_SCHEDULES:
        return PausingPruner(HALVING_SCHEDULES[name], budget, objectives)
    raise UsageError(
        f"--pruner must be none, median, percentile:P with P between 0 and 100, asha, hyperband or one-epoch, "
        f"not {name!r}"
    )


def describe_blind_spot(name: str, objectives: Objectives, evaluations: Sequence[Evaluation]) -> str:
    """Return a warning if a pruner does not know all objectives of a search at its rungs; empty otherwise."""
    if name == "none" or not objectives.is_multi_objective:
        return ""
    if name not in HALVING_SCHEDULES:
        return (
            f"warning: --pruner {name} judges by the loss alone, and the objectives are "
            f"{', '.join(objectives.describe())}. Use asha, hyperband or one-epoch, which judge by dominance"
        )
    own = group_by_individual([one for one in evaluations if not one.imported_from])
    unknown = sum(_has_unknown_rung(HALVING_SCHEDULES[name], root, group) for root, group in own.items())
    if not unknown:
        return ""
    return (
        f"warning: --pruner {name}: {format_count(unknown, 'evaluation')} of earlier sessions did not record "
        f"{', '.join(objectives.metric_names)} at rungs. Their last values are used instead"
    )


def _has_unknown_rung(halving: HalvingSchedule, root: int, group: Sequence[Evaluation]) -> bool:
    """Tell whether an individual has passed a rung at which only its loss is known."""
    latest, longest = group[-1], max(group, key=lambda one: len(one.curve))
    rungs = halving.list_rungs(halving.find_bracket(root), max(longest.curve, default=0))
    return latest.state != "failed" and any(epochs not in longest.at_rungs for epochs in rungs)
