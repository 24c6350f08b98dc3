"""Create pruners from their names on the command line. Some stop evaluations, others pause them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Union

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
    """Hold the decision of a pruner on an evaluation.

    Attributes:
        state: How the evaluation continues.
        may_be_promoted: Whether a paused evaluation can still be promoted in this run.
        eliminated: First trials of the paused individuals that can no longer be promoted.
    """

    state: Literal["running", "pruned", "paused"]
    may_be_promoted: bool = False
    eliminated: Sequence[int] = ()


@dataclass(frozen=True)
class StoppingPruner:
    """Stop evaluations by one of Optuna's pruners, which decides after each step."""

    pruner: BasePruner

    def decide_pruning(self, record: Record, assignment: Assignment, *_: object) -> PruningDecision:
        """Decide whether to stop an evaluation by comparing it with all other evaluations in the record."""
        return PruningDecision("pruned" if record.should_prune(assignment, self.pruner) else "running")


@dataclass(frozen=True)
class PausingPruner:
    """Pause an evaluation at a rung unless it is among the best.

    Several objectives are compared by dominance.

    Attributes:
        halving: Schedule of the rungs.
        budget: Number of evaluations of the run.
        objectives: Objectives of the run.
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
        """Decide whether to pause an evaluation that has reported `epochs` losses.

        The evaluation is compared with all others in the record. With several objectives, `values` must be the values
        of all objectives at the lowest loss so far. They are recorded. With one objective, `values` is not used.
        """
        if not self.halving.has_rung(assignment.root, epochs):
            return PruningDecision("running")
        if self.objectives.is_multi_objective:
            record.record_rung_values(assignment, epochs, values)
        rung = self._successive_halving.update(record.read_evaluations()).find_rung(
            self.halving.find_bracket(assignment.root), epochs
        )
        if rung is None or not rung.is_effective:
            return PruningDecision("running")  # The evaluation is near its end.
        limit = self.halving.count_promoted(self.budget)
        eliminated = [root for root in rung.ranking.find_behind(limit) if root in rung.paused]
        may_be_promoted = not rung.ranking.is_behind(assignment.root, limit)
        if rung.is_promoted(assignment.root):
            return PruningDecision("running", may_be_promoted, eliminated)
        return PruningDecision("paused", may_be_promoted, eliminated)


Pruner = Union[StoppingPruner, PausingPruner]


def make_pruner(name: str, budget: int, objectives: Objectives = ONLY_LOSS) -> Pruner | None:
    """Create the pruner with this name; return None for the name "none".

    Args:
        name: Name of the pruner, which is the value of the option --pruner.
        budget: Number of evaluations of the run.

    Returns:
        The pruner, or None.

    Raises:
        UsageError: If the name is unknown.
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
        f"got {name!r}"
    )


def describe_blind_spot(name: str, objectives: Objectives, evaluations: Sequence[Evaluation]) -> str:
    """Return a warning if a pruner cannot compare all objectives; an empty string otherwise.

    Some pruners compare only the loss. The others need all values at rungs, but earlier sessions may have recorded only
    the loss.
    """
    if name == "none" or not objectives.is_multi_objective:
        return ""
    if name not in HALVING_SCHEDULES:
        return (
            f"warning: --pruner {name} compares only the loss, but the objectives are "
            f"{', '.join(objectives.describe())}. Use asha, hyperband or one-epoch, which compare by dominance"
        )
    own = group_by_individual([evaluation for evaluation in evaluations if not evaluation.imported_from])
    unknown = sum(_has_unknown_rung(HALVING_SCHEDULES[name], root, group) for root, group in own.items())
    if not unknown:
        return ""
    return (
        f"warning: --pruner {name}: {format_count(unknown, 'evaluation')} of earlier sessions did not record "
        f"{', '.join(objectives.metric_names)} at rungs. Their last values are used instead"
    )


def _has_unknown_rung(halving: HalvingSchedule, root: int, group: Sequence[Evaluation]) -> bool:
    """Return whether an individual that has not failed has passed a rung at which only its loss was recorded."""
    latest, longest = group[-1], max(group, key=lambda evaluation: len(evaluation.curve))
    rungs = halving.list_rungs(halving.find_bracket(root), max(longest.curve, default=0))
    return latest.state != "failed" and any(epochs not in longest.at_rungs for epochs in rungs)
