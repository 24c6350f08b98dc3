"""Stop or pause evaluations that are worse than others.

Optuna's pruners stop them. Successive halving pauses them at a rung, and promotes a paused
evaluation when it is among the best of its rung. This is ASHA, with promotion as in its algorithm 2
(Li et al., "A system for massively parallel hyperparameter tuning", 2020) and with Hyperband's
brackets. The pruner "one-epoch" has one rung (Egele et al., "Is one epoch all you need for
multi-fidelity hyperparameter optimization?", 2023). Several objectives are compared by dominance
(`hpo.store.ranking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Union

from optuna.pruners import BasePruner, MedianPruner, PercentilePruner

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.options import parse_percentile
from hpo.store.evaluations import Assignment, Evaluation, find_root, group_by_individual
from hpo.store.ranking import Ranking, make_ranking
from hpo.text_format import format_count

if TYPE_CHECKING:
    from hpo.store.record import Record


@dataclass(frozen=True)
class HalvingSchedule:
    """Define rungs after `first`, `first * factor`, ... epochs, at which only the best continue.

    A bracket is a series of rungs with its own `first`. Individuals are assigned to brackets so
    that each bracket gets about the same number of epochs (Li et al., "Hyperband", 2018), and they
    compete within their bracket.

    Attributes:
        factor: At each rung, one in `factor` individuals continues, but at least one individual.
        first_rungs: First rung of each bracket, in epochs.
        promotion_limit: Number of individuals that continue if there is only one rung; None for
            rungs by `factor`.
    """

    factor: int = 3
    first_rungs: tuple[int, ...] = (1,)
    promotion_limit: int | None = None

    def find_bracket(self, root: int) -> int:
        """Return the index of an individual's bracket. `root` is the number of its first trial."""
        return self._bracket_cycle[root % len(self._bracket_cycle)]

    @cached_property
    def _bracket_cycle(self) -> list[int]:
        """Brackets of consecutive individuals, evenly mixed. The sequence repeats."""
        last = len(self.first_rungs) - 1
        shares = [self.factor ** (last - bracket) for bracket in range(last + 1)]
        turns = sorted(
            ((turn + 0.5) / share, b) for b, share in enumerate(shares) for turn in range(share)
        )
        return [bracket for _, bracket in turns]

    def list_rungs(self, bracket: int, epochs: int) -> list[int]:
        """Return the rungs of a bracket up to `epochs`, each as its number of epochs."""
        found: list[int] = []
        rung = self.first_rungs[bracket]
        while rung <= epochs and not (found and self.promotion_limit is not None):
            found.append(rung)
            rung *= self.factor
        return found

    def has_rung(self, root: int, epochs: int) -> bool:
        """Return whether the bracket of an individual has a rung after `epochs`."""
        return epochs in self.list_rungs(self.find_bracket(root), epochs)

    def count_promoted(self, reached: int) -> int:
        """Return how many individuals continue if `reached` individuals have reached a rung."""
        if self.promotion_limit is not None:
            return self.promotion_limit
        return max(1, reached // self.factor)

    def compute_max_paused(self, budget: int, objectives: Objectives) -> int:
        """Return how many paused individuals can still be promoted at most, given the budget."""
        if objectives.is_multi_objective:
            return budget  # All may be on one Pareto front.
        if self.promotion_limit is not None:
            return self.promotion_limit
        return budget // (self.factor - 1)

    def count_needed(self, position: int) -> int | None:
        """Return how many must reach a rung before `position` (from 0) continues."""
        if self.promotion_limit is not None:
            return 1 if position < self.promotion_limit else None
        return self.factor * (position + 1) if position else 1


# As in Hyperband, one in three individuals continues. 300 epochs have six rungs.
HALVING_SCHEDULES = {
    "asha": HalvingSchedule(),
    "hyperband": HalvingSchedule(first_rungs=(1, 3, 9)),
    "one-epoch": HalvingSchedule(promotion_limit=3),
}


@dataclass(frozen=True)
class Rung:
    """Describe the rung of a bracket after `epochs`.

    The number of its first trial identifies an individual.

    Attributes:
        is_effective: Whether only the best continue. If not, all continue, and only individuals
            that paused here are listed.
        ranking: Individuals, ordered by their costs at this rung. The costs of failed individuals
            are infinite.
        promoted_count: Number of individuals that continue.
        continued: Individuals that have been trained further.
        paused: Last evaluation of each paused individual, by first trial.
        stopped: Individuals that never continue.
    """

    bracket: int
    epochs: int
    is_effective: bool
    ranking: Ranking = field(repr=False, compare=False)
    promoted_count: int
    continued: set[int]
    paused: Mapping[int, Evaluation] = field(repr=False)
    stopped: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def losses(self) -> list[tuple[float, int]]:
        """Lowest loss and first trial of each individual at this rung as pairs, best first."""
        return self.ranking.entries

    def is_promoted(self, root: int) -> bool:
        """Return whether an individual continues after this rung.

        An individual that was trained further and then lost its checkpoint continues, too.
        """
        return root in self.continued or self.ranking.is_best(
            root, self.promoted_count, self.paused, self.stopped
        )

    @property
    def promotable(self) -> list[Evaluation]:
        """Paused evaluations that are now among the best, so that they should be promoted."""
        return [
            self.paused[root]
            for root in self.ranking.select_best(self.promoted_count, self.paused, self.stopped)
        ]

    @property
    def next_paused(self) -> tuple[int, Evaluation] | None:
        """Position (from 0) and evaluation of the best paused individual; None if there is none."""
        found = self.ranking.find_next(self.paused, self.stopped)
        return found and (found[0], self.paused[found[1]])


class _RungMembers:
    """Collect the individuals that have reached a rung.

    The numbers of their first trials identify them.
    """

    def __init__(self, objectives: Objectives) -> None:
        self.ranking = make_ranking(len(objectives.names))
        self.continued: set[int] = set()
        self.paused: dict[int, Evaluation] = {}
        self.last_paused: set[int] = set()  # They may be running again.
        self.stopped: set[int] = set()

    def update(self, root: int, latest: Evaluation, epochs: int, most: int) -> None:
        self._forget(root)
        if most > epochs:
            self.continued.add(root)
        if latest.paused_after == epochs:
            self.last_paused.add(root)
            if latest.state == "paused":
                self.paused[root] = latest
        elif latest.state == "pruned" and most == epochs:
            self.stopped.add(root)

    def remove(self, root: int) -> None:
        self.ranking.remove(root)
        self._forget(root)

    def _forget(self, root: int) -> None:
        for members in (self.continued, self.last_paused, self.stopped):
            members.discard(root)
        self.paused.pop(root, None)


class SuccessiveHalving:
    """Maintain the rungs of a search.

    The cost of an update does not grow with the number of evaluations. At an effective rung, only
    the best continue. A rung is effective only if the longest complete evaluation reaches the next
    rung. If there is only one rung, this evaluation must reach twice the epochs of the rung. All
    rungs are effective while no evaluation is complete. Imported evaluations are on no rung.
    """

    def __init__(self, halving: HalvingSchedule, objectives: Objectives = ONLY_LOSS) -> None:
        self._halving = halving
        self._objectives = objectives
        self._seen_count = 0  # Number of evaluations.
        self._roots: dict[int, int] = {}  # First trial of the individual, by trial.
        # Indices of an individual's evaluations, by first trial.
        self._group_indices: dict[int, list[int]] = {}
        self._unfinished: dict[int, Evaluation] = {}
        self._members: dict[tuple[int, int], _RungMembers] = {}
        # Costs by first trial and rung.
        self._rung_costs: dict[int, dict[tuple[int, int], tuple[float, ...]]] = {}
        self._longest_complete: int | None = None  # Epochs of the longest complete evaluation.

    def update(self, evaluations: Sequence[Evaluation]) -> SuccessiveHalving:
        """Add the changes of all evaluations since the last call; return this object."""
        changed = [
            index
            for index, evaluation in self._unfinished.items()
            if evaluations[index] is not evaluation
        ]
        moved = set()
        for index in (*changed, *range(self._seen_count, len(evaluations))):
            evaluation = evaluations[index]
            self._track_state(index, evaluation)
            if evaluation.imported_from or evaluation.tests is not None:
                continue
            moved.add(root := find_root(evaluation, self._roots))
            if index >= self._seen_count:
                self._group_indices.setdefault(root, []).append(index)
        self._seen_count = len(evaluations)
        for root in moved:
            self._update_rungs(root, [evaluations[index] for index in self._group_indices[root]])
        return self

    def _track_state(self, index: int, evaluation: Evaluation) -> None:
        if evaluation.state in ("running", "waiting"):
            self._unfinished[index] = evaluation
            return
        self._unfinished.pop(index, None)
        if evaluation.state == "complete" and not evaluation.cut_after:
            self._longest_complete = max(self._longest_complete or 0, *evaluation.curve, 0)

    def _update_rungs(self, root: int, group: Sequence[Evaluation]) -> None:
        latest = group[-1]
        longest = max(group, key=lambda evaluation: len(evaluation.curve))
        bracket = self._halving.find_bracket(root)
        most = max(longest.curve, default=0)
        before = self._rung_costs.get(root, {})
        now = {}
        others = next(
            (evaluation.other_values for evaluation in reversed(group) if evaluation.other_values),
            (),
        )
        for epochs in self._halving.list_rungs(bracket, most):
            now[bracket, epochs] = self._compute_costs(
                longest, epochs, others, latest.state == "failed"
            )
        for key in before.keys() - now.keys():
            self._members[key].remove(root)
        for key, costs in now.items():
            reached = self._members.setdefault(key, _RungMembers(self._objectives))
            if before.get(key) != costs:
                if key in before:
                    reached.remove(root)
                reached.ranking.add(root, costs)
            reached.update(root, latest, key[1], most)
        self._rung_costs[root] = now

    def _compute_costs(
        self, longest: Evaluation, epochs: int, others: tuple[float, ...], has_failed: bool
    ) -> tuple[float, ...]:
        """Return the costs of an individual at the rung after `epochs`: infinite if it has failed.

        Otherwise, the costs come from the values at its lowest loss up to this rung. `longest` is
        its longest evaluation. `others`, the latest values of the other objectives, replace values
        that the rung does not have.
        """
        losses = [loss for epoch, loss in longest.curve.items() if epoch <= epochs]
        lowest = min((loss for loss in losses if not math.isnan(loss)), default=math.inf)
        if not self._objectives.is_multi_objective:
            return (math.inf if has_failed else lowest,)
        values = longest.at_rungs.get(epochs, (lowest, *others))
        return self._objectives.compute_costs(() if has_failed else values)

    def find_rung(self, bracket: int, epochs: int) -> Rung | None:
        """Return a rung; None if no individual has reached it, or must or did pause there."""
        reached = self._members.get((bracket, epochs))
        if reached is None:
            return None
        factor = 2 if self._halving.promotion_limit else self._halving.factor
        ranking = reached.ranking
        continued = reached.continued
        is_effective = self._longest_complete is None or epochs <= self._longest_complete / factor
        if is_effective:
            count = self._halving.count_promoted(len(ranking))
        else:
            ranking = ranking.restrict_to(reached.last_paused)
            continued = continued & reached.last_paused
            count = len(ranking)
            if not count:
                return None
        return Rung(
            bracket,
            epochs,
            is_effective,
            ranking,
            count,
            continued,
            reached.paused,
            reached.stopped,
        )

    def list_rungs(self) -> list[Rung]:
        """Return the rungs that were reached, ordered by bracket and epochs."""
        found = (
            self.find_rung(*key)
            for key, reached in sorted(self._members.items())
            if len(reached.ranking)
        )
        return [rung for rung in found if rung is not None]

    def find_promotable(self) -> list[Evaluation]:
        """Return the paused evaluations to promote, highest rungs first."""
        rungs = sorted(self.list_rungs(), key=lambda rung: -rung.epochs)
        return [evaluation for rung in rungs for evaluation in rung.promotable]


def compute_rungs(
    halving: HalvingSchedule, evaluations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> list[Rung]:
    """Return the rungs that were reached, ordered by bracket and epochs."""
    return SuccessiveHalving(halving, objectives).update(evaluations).list_rungs()


def find_promotable(
    halving: HalvingSchedule | None,
    evaluations: Sequence[Evaluation],
    objectives: Objectives = ONLY_LOSS,
) -> list[Evaluation]:
    """Return the paused evaluations to promote, highest rungs first; none without a schedule."""
    if halving is None:
        return []
    return SuccessiveHalving(halving, objectives).update(evaluations).find_promotable()


def is_search_over(
    evaluations: Sequence[Evaluation],
    budget: float,
    pruner: str,
    objectives: Objectives = ONLY_LOSS,
) -> bool:
    """Return whether a search has used its budget and has no paused evaluation to promote."""
    spent = sum(evaluation.counts_for_budget for evaluation in evaluations) >= budget
    return spent and not find_promotable(HALVING_SCHEDULES.get(pruner), evaluations, objectives)


@dataclass(frozen=True)
class PruningDecision:
    """Hold the decision of a pruner on an evaluation."""

    state: Literal["running", "pruned", "paused"]
    may_be_promoted: bool = False
    """Whether a paused evaluation can still be promoted in this run."""
    eliminated: Sequence[int] = ()
    """First trials of the paused individuals that can no longer be promoted."""


@dataclass(frozen=True)
class StoppingPruner:
    """Stop evaluations by one of Optuna's pruners, which decides after each step."""

    pruner: BasePruner

    def decide_pruning(self, record: Record, assignment: Assignment, *_: object) -> PruningDecision:
        """Decide whether to stop an evaluation by comparing it with all others."""
        is_pruned = record.should_prune(assignment, self.pruner)
        return PruningDecision("pruned" if is_pruned else "running")


@dataclass(frozen=True)
class PausingPruner:
    """Pause an evaluation at a rung unless it is among the best."""

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

        The evaluation is compared with all others in the record. With several objectives, `values`
        must be the values of all objectives at the lowest loss so far. They are recorded. With one
        objective, `values` is not used.
        """
        if not self.halving.has_rung(assignment.root, epochs):
            return PruningDecision("running")
        if self.objectives.is_multi_objective:
            record.record_rung_values(assignment, epochs, values)
        self._successive_halving.update(record.read_evaluations())
        bracket = self.halving.find_bracket(assignment.root)
        rung = self._successive_halving.find_rung(bracket, epochs)
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
    """Create the pruner that --pruner names; None for "none"."""
    if name == "none":
        return None
    if name == "median":
        return StoppingPruner(MedianPruner())
    if name in HALVING_SCHEDULES:
        return PausingPruner(HALVING_SCHEDULES[name], budget, objectives)
    return StoppingPruner(PercentilePruner(parse_percentile(name)))


def describe_blind_spot(
    name: str, objectives: Objectives, evaluations: Sequence[Evaluation]
) -> str:
    """Return a warning if a pruner cannot compare all objectives; an empty string otherwise.

    Some pruners compare only the loss. The others need all values at rungs, but earlier sessions
    may have recorded only the loss.
    """
    if name == "none" or not objectives.is_multi_objective:
        return ""
    if name not in HALVING_SCHEDULES:
        return (
            f"warning: --pruner {name} compares only the loss, but the objectives are "
            f"{', '.join(objectives.describe())}. Use asha, hyperband or one-epoch, which compare "
            "by dominance"
        )
    halving = HALVING_SCHEDULES[name]
    own = [evaluation for evaluation in evaluations if not evaluation.imported_from]
    unknown = 0
    for root, group in group_by_individual(own).items():
        longest = max(group, key=lambda evaluation: len(evaluation.curve))
        rungs = halving.list_rungs(halving.find_bracket(root), max(longest.curve, default=0))
        is_unknown = any(epochs not in longest.at_rungs for epochs in rungs)
        unknown += group[-1].state != "failed" and is_unknown
    if not unknown:
        return ""
    return (
        f"warning: --pruner {name}: {format_count(unknown, 'evaluation')} of earlier sessions did "
        f"not record {', '.join(objectives.metric_names)} at rungs. Their last values are used "
        "instead"
    )
