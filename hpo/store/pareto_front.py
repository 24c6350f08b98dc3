"""Find the Pareto front of a run: the complete evaluations that no other evaluation dominates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hpo.dominance import (
    Costs,
    compute_crowding_distances,
    compute_domination_ranks,
    find_non_dominated,
)
from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, rank_evaluations

_LARGE_DISTANCE = 1e300  # Larger than any distance.
MAX_FRONT_WEIGHTS = 10  # Individuals on the front whose weights are kept.


def compute_costs(evaluations: Sequence[Evaluation], objectives: Objectives) -> Costs:
    """Return costs, shape (evaluations, objectives); lower is better, not finite is infinite."""
    costs = [objectives.compute_costs(evaluation.values) for evaluation in evaluations]
    return np.array(costs, float).reshape(-1, len(objectives.names))


def find_front(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the evaluations on the Pareto front, lowest loss first.

    Evaluations with equal values are all included. If the loss is the only objective, return only
    the earliest evaluation with the lowest loss.
    """
    finite = [
        evaluation
        for evaluation in rank_evaluations(evaluations, len(evaluations))
        if all(map(math.isfinite, objectives.compute_costs(evaluation.values)))
    ]
    if not objectives.is_multi_objective:
        return finite[:1]
    return list(itertools.compress(finite, find_non_dominated(compute_costs(finite, objectives))))


def drop_equal_values(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations with distinct values: of equal values, the earliest trial."""
    earliest: dict[tuple[float, ...], Evaluation] = {}
    for evaluation in evaluations:
        same = earliest.get(evaluation.values, evaluation)
        earliest[evaluation.values] = min(same, evaluation, key=lambda equal: equal.trial)
    return list(earliest.values())


def select_top(
    evaluations: Sequence[Evaluation], n: int, objectives: Objectives
) -> list[Evaluation]:
    """Return the `n` best complete evaluations by non-dominated sorting, the front first.

    The next layer is the front of the remaining evaluations, and so on. Evaluations of one layer
    are ordered by their losses.
    """
    complete = rank_evaluations(evaluations, len(evaluations))
    if not objectives.is_multi_objective:
        return complete[:n]
    layer = compute_domination_ranks(compute_costs(complete, objectives))
    return [complete[index] for index in np.argsort(layer, kind="stable")[:n]]


def select_spread(
    evaluations: Sequence[Evaluation], objectives: Objectives, limit: int = MAX_FRONT_WEIGHTS
) -> list[Evaluation]:
    """Select at most `limit` evaluations of a front, as different as possible, in their order."""
    return [
        evaluations[index]
        for index in select_far_apart(compute_costs(evaluations, objectives), limit)
    ]


def select_far_apart(costs: Costs, limit: int) -> list[int]:
    """Return the ascending indices of at most `limit` costs, as different as possible.

    The best individual of each objective is included, unless there are more than `limit` of these.
    """
    kept = list(range(len(costs)))
    best = set(costs.argmin(axis=0).tolist()) if kept else set()
    while len(kept) > limit:
        apart = np.where(
            [index in best for index in kept],
            np.inf,
            np.minimum(compute_crowding_distances(costs[kept]), _LARGE_DISTANCE),
        )
        del kept[len(kept) - 1 - int(np.argmin(apart[::-1]))]
    return kept


class FrontArchive:
    """Maintain the Pareto front while evaluations are added.

    If the loss is the only objective, the front is the earliest evaluation with the lowest loss.

    Attributes:
        front: Evaluations on the front, unordered.
        costs: Costs of the evaluations in `front`, shape (evaluations, objectives).
    """

    def __init__(self, objectives: Objectives, evaluations: Sequence[Evaluation] = ()) -> None:
        self._objectives = objectives
        self.front = find_front(evaluations, objectives)
        self.costs = compute_costs(self.front, objectives)

    def would_join(self, trial: int, values: Sequence[float]) -> bool:
        """Return whether a trial with these values would be on the front."""
        own = self._objectives.compute_costs(values)
        behind = (self.costs <= own).all(axis=1)
        equals = np.flatnonzero((self.costs == own).all(axis=1))
        return not behind.any() or (
            len(equals) > 0 and all(self.front[index].trial > trial for index in equals)
        )

    def add(self, evaluation: Evaluation) -> bool:
        """Add an evaluation, remove those that it dominates, and return whether it joined."""
        own = compute_costs([evaluation], self._objectives)
        if evaluation.state != "complete" or not np.isfinite(own).all():
            return False
        equal = (self.costs == own).all(axis=1)
        if ((self.costs <= own).all(axis=1) & ~equal).any():
            return False
        if equal.any() and not self._objectives.is_multi_objective:
            self.front = [min(self.front[0], evaluation, key=lambda equal: equal.trial)]
            return False
        stays = ~(self.costs >= own).all(axis=1) | equal
        self.front = [*itertools.compress(self.front, stays), evaluation]
        self.costs = np.vstack([self.costs[stays], own])
        return True
