"""The Pareto front of a run: the complete evaluations of which no other one is better in all objectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hpo.dominance import Costs, compute_crowding_distances, compute_domination_ranks, find_non_dominated
from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, rank_evaluations

_LARGE_DISTANCE = 1e300  # more than any distance
MAX_FRONT_WEIGHTS = 10  # individuals of the front whose weights are kept


def compute_costs(evaluations: Sequence[Evaluation], objectives: Objectives) -> Costs:
    """Return the costs of evaluations, shape (evaluations, objectives), the lower the better; infinite without any."""
    costs = [objectives.compute_costs(one.values) for one in evaluations]
    return np.array(costs, float).reshape(-1, len(objectives.names))


def find_front(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the evaluations of the front, those with the lowest loss first; equals are all on it.

    If the loss is the only objective, return the first evaluation with the lowest loss.
    """
    finite = [
        one
        for one in rank_evaluations(evaluations, len(evaluations))
        if all(map(math.isfinite, objectives.compute_costs(one.values)))
    ]
    if not objectives.is_multi_objective:
        return finite[:1]
    return list(itertools.compress(finite, find_non_dominated(compute_costs(finite, objectives))))


def drop_equal_values(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations, without those that have the values of an earlier trial."""
    first: dict[tuple[float, ...], Evaluation] = {}
    for one in evaluations:
        first[one.values] = min(first.get(one.values, one), one, key=lambda equal: equal.trial)
    return list(first.values())


def select_top(evaluations: Sequence[Evaluation], n: int, objectives: Objectives) -> list[Evaluation]:
    """Return the n best complete evaluations: those of the front first, then those that only they dominate, and so on.

    Those of one layer are in the order of their losses.
    """
    complete = rank_evaluations(evaluations, len(evaluations))
    if not objectives.is_multi_objective:
        return complete[:n]
    layer = compute_domination_ranks(compute_costs(complete, objectives))
    return [complete[place] for place in np.argsort(layer, kind="stable")[:n]]


def select_spread(
    evaluations: Sequence[Evaluation], objectives: Objectives, limit: int = MAX_FRONT_WEIGHTS
) -> list[Evaluation]:
    """Return so many of a front at most, as far apart as can be, in their old order."""
    return [evaluations[place] for place in select_far_apart(compute_costs(evaluations, objectives), limit)]


def select_far_apart(costs: Costs, limit: int) -> list[int]:
    """Return the places of so many individuals of a front at most, as far apart as can be, in their order.

    The best in each objective are among them, unless there are more of these.
    """
    kept = list(range(len(costs)))
    best = set(costs.argmin(axis=0).tolist()) if kept else set()
    while len(kept) > limit:
        apart = np.where(
            [place in best for place in kept],
            np.inf,
            np.minimum(compute_crowding_distances(costs[kept]), _LARGE_DISTANCE),
        )
        del kept[len(kept) - 1 - int(np.argmin(apart[::-1]))]
    return kept


class FrontArchive:
    """The front while evaluations end: `front` are the evaluations on it by now, with their `costs`, unordered.

    If the loss is the only objective, only the first of equals is on it, as in `front`.
    """

    def __init__(self, objectives: Objectives, evaluations: Sequence[Evaluation] = ()) -> None:
        self._objectives = objectives
        self.front = find_front(evaluations, objectives)
        self.costs = compute_costs(self.front, objectives)

    def would_join(self, trial: int, values: Sequence[float]) -> bool:
        """Tell whether a trial with these values would be on the front, as the first of its equals."""
        own = self._objectives.compute_costs(values)
        behind = (self.costs <= own).all(axis=1)
        equals = np.flatnonzero((self.costs == own).all(axis=1))
        return not behind.any() or (len(equals) > 0 and all(self.front[index].trial > trial for index in equals))

    def add(self, one: Evaluation) -> bool:
        """Tell whether an evaluation joins the front, which those that it dominates leave."""
        own = compute_costs([one], self._objectives)
        if one.state != "complete" or not np.isfinite(own).all():
            return False
        equal = (self.costs == own).all(axis=1)
        if ((self.costs <= own).all(axis=1) & ~equal).any():
            return False
        if equal.any() and not self._objectives.is_multi_objective:
            self.front = [min(self.front[0], one, key=lambda equal: equal.trial)]
            return False
        stays = ~(self.costs >= own).all(axis=1) | equal
        self.front = [*itertools.compress(self.front, stays), one]
        self.costs = np.vstack([self.costs[stays], own])
        return True
