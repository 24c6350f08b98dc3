"""The Pareto front of a run: the complete evaluations of which no other one is better in all objectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from hpo.dominance import Costs, crowding, layers, non_dominated
from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, rank

_APART = 1e300  # more than any distance
MOST_WEIGHTS = 10  # individuals of the front whose weights are kept


def costs_of(evaluations: Sequence[Evaluation], objectives: Objectives) -> Costs:
    """Return the costs of evaluations, shape (evaluations, objectives), the lower the better; infinite without any."""
    costs = [objectives.costs(one.values) for one in evaluations]
    return np.array(costs, float).reshape(-1, len(objectives.names))


def front(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the evaluations of the front, those with the lowest loss first; equals are all on it.

    If the loss is the only objective, return the first evaluation with the lowest loss.
    """
    finite = [
        one for one in rank(evaluations, len(evaluations)) if all(map(math.isfinite, objectives.costs(one.values)))
    ]
    if not objectives.are_several:
        return finite[:1]
    return list(itertools.compress(finite, non_dominated(costs_of(finite, objectives))))


def first_of_equals(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations, without those that have the values of an earlier trial."""
    first: dict[tuple[float, ...], Evaluation] = {}
    for one in evaluations:
        first[one.values] = min(first.get(one.values, one), one, key=lambda equal: equal.trial)
    return list(first.values())


def top(evaluations: Sequence[Evaluation], n: int, objectives: Objectives) -> list[Evaluation]:
    """Return the n best complete evaluations: those of the front first, then those that only they dominate, and so on.

    Those of one layer are in the order of their losses.
    """
    complete = rank(evaluations, len(evaluations))
    if not objectives.are_several:
        return complete[:n]
    layer = layers(costs_of(complete, objectives))
    return [complete[place] for place in np.argsort(layer, kind="stable")[:n]]


def spread(evaluations: Sequence[Evaluation], objectives: Objectives, most: int = MOST_WEIGHTS) -> list[Evaluation]:
    """Return so many of a front at most, as far apart as can be, in their old order."""
    return [evaluations[place] for place in far_apart(costs_of(evaluations, objectives), most)]


def far_apart(costs: Costs, most: int) -> list[int]:
    """Return the places of so many individuals of a front at most, as far apart as can be, in their order.

    The best in each objective are among them, unless there are more of these.
    """
    kept = list(range(len(costs)))
    best = set(costs.argmin(axis=0).tolist()) if kept else set()
    while len(kept) > most:
        apart = np.where([place in best for place in kept], np.inf, np.minimum(crowding(costs[kept]), _APART))
        del kept[len(kept) - 1 - int(np.argmin(apart[::-1]))]
    return kept


class Archive:
    """The front while evaluations end: `front` are the evaluations on it by now, with their `costs`, unordered.

    If the loss is the only objective, only the first of equals is on it, as in `front`.
    """

    def __init__(self, objectives: Objectives, evaluations: Sequence[Evaluation] = ()) -> None:
        self._objectives = objectives
        self.front = front(evaluations, objectives)
        self.costs = costs_of(self.front, objectives)

    def has_room_for(self, trial: int, values: Sequence[float]) -> bool:
        """Tell whether a trial with these values would be on the front, as the first of its equals."""
        own = self._objectives.costs(values)
        behind = (self.costs <= own).all(axis=1)
        equals = np.flatnonzero((self.costs == own).all(axis=1))
        return not behind.any() or (len(equals) > 0 and all(self.front[index].trial > trial for index in equals))

    def add(self, one: Evaluation) -> bool:
        """Tell whether an evaluation joins the front, which those that it dominates leave."""
        own = costs_of([one], self._objectives)
        if one.state != "complete" or not np.isfinite(own).all():
            return False
        equal = (self.costs == own).all(axis=1)
        if ((self.costs <= own).all(axis=1) & ~equal).any():
            return False
        if equal.any() and not self._objectives.are_several:
            self.front = [min(self.front[0], one, key=lambda equal: equal.trial)]
            return False
        stays = ~(self.costs >= own).all(axis=1) | equal
        self.front = [*itertools.compress(self.front, stays), one]
        self.costs = np.vstack([self.costs[stays], own])
        return True
