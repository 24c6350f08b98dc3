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
    """Return the evaluations of the front, those with the lowest loss first; of equal ones the first alone.

    Where the loss is the only objective, it is the evaluation with the lowest.
    """
    first: dict[tuple[float, ...], Evaluation] = {}
    for one in rank(evaluations, len(evaluations)):
        if all(map(math.isfinite, objectives.costs(one.values))):
            first.setdefault(one.values, one)
    different = list(first.values())
    kept = non_dominated(costs_of(different, objectives))
    return [one for one, is_kept in zip(different, kept, strict=True) if is_kept]


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
    """The front while evaluations come one by one: `front` are those on it by now, with their `costs`, unordered.

    Of equals, it has the first by their trials, as `front` does.
    """

    def __init__(self, objectives: Objectives, evaluations: Sequence[Evaluation] = ()) -> None:
        self._objectives = objectives
        self.front = front(evaluations, objectives)
        self.costs = costs_of(self.front, objectives)

    def has_room_for(self, trial: int, values: Sequence[float]) -> bool:
        """Tell whether a trial with these values would be on the front, or stand for its equals there."""
        own = self._objectives.costs(values)
        behind = (self.costs <= own).all(axis=1)
        equals = np.flatnonzero((self.costs == own).all(axis=1))
        return not behind.any() or any(self.front[place].trial > trial for place in equals)

    def add(self, one: Evaluation) -> bool:
        """Tell whether an evaluation joins the front, which those that it dominates leave; equals are nothing new."""
        own = costs_of([one], self._objectives)
        if one.state != "complete" or not np.isfinite(own).all():
            return False
        behind = (self.costs <= own).all(axis=1)
        if behind.any():
            for place in np.flatnonzero((self.costs == own).all(axis=1)):
                self.front[place] = min(self.front[place], one, key=lambda equal: equal.trial)
            return False
        stays = ~(self.costs >= own).all(axis=1)
        self.front = [*itertools.compress(self.front, stays), one]
        self.costs = np.vstack([self.costs[stays], own])
        return True
