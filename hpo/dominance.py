"""Which of several individuals are better where several costs count: dominance, crowding, hypervolume.

Costs are arrays of shape (individuals, objectives), the lower the better. One individual dominates another one if none
of its costs is higher, and one is lower.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


def find_non_dominated(costs: Costs) -> npt.NDArray[np.bool_]:
    """Tell of each individual whether no other one dominates it, shape (individuals,); equals are all or none."""
    if costs.shape[1] == 2 and len(costs):
        return _find_non_dominated_pairs(costs)
    left, place = np.lexsort(costs.T[::-1]), 0  # nobody is dominated by one behind it
    while place < len(left):
        there, own = costs[left], costs[left[place]]
        kept = ~((there >= own).all(axis=1) & (there > own).any(axis=1))
        left, place = left[kept], int(kept[:place].sum()) + 1
    found = np.zeros(len(costs), bool)
    found[left] = True
    return found


def _find_non_dominated_pairs(costs: Costs) -> npt.NDArray[np.bool_]:
    """Tell the same of two objectives in one sweep: who comes first in one has to be better in the other."""
    pairs, places = np.unique(costs, axis=0, return_inverse=True)
    lowest = np.minimum.accumulate(pairs[:, 1])
    kept: npt.NDArray[np.bool_] = np.append(True, pairs[1:, 1] < lowest[:-1])[places.ravel()]
    return kept


def compute_domination_ranks(costs: Costs, most_ranked: int | None = None) -> npt.NDArray[np.int64]:
    """Return the layer of each individual: 0 if it is not dominated, 1 if only layer 0 dominates it, and so on.

    Only as many are told apart as `most` asks for; all others are in the last layer.
    """
    found = np.zeros(len(costs), np.int64)
    left, layer = np.arange(len(costs)), 0
    while len(left) and (most_ranked is None or len(costs) - len(left) < most_ranked):
        here = find_non_dominated(costs[left])
        found[left[here]] = layer
        left, layer = left[~here], layer + 1
    found[left] = layer
    return found


def compute_crowding_distances(costs: Costs) -> npt.NDArray[np.float64]:
    """Return how far each individual of a layer is from its neighbours, shape (individuals,); infinite at its ends.

    Costs must be finite. Deb et al., A fast and elitist multiobjective genetic algorithm: NSGA-II (2002), III-B.
    """
    distances = np.zeros(len(costs))
    for own in costs.T / 2:  # halves: the difference of two floats may overflow
        order = np.argsort(own, kind="stable")
        span = own[order[-1]] - own[order[0]] if len(order) else 0.0
        if span > 0:
            distances[order[1:-1]] += (own[order[2:]] - own[order[:-2]]) / span
            distances[order[[0, -1]]] = np.inf
    return distances


def sort_best_first(costs: Costs, most_sorted: int | None = None) -> npt.NDArray[np.int64]:
    """Return the order of individuals: by layers, and in each the least crowded first (NSGA-II).

    Only as many are in their order as `most` asks for.
    """
    if costs.shape[1] == 1:
        return _sort_lowest_first(costs[:, 0], most_sorted)
    layer = compute_domination_ranks(costs, most_sorted)
    apart = np.zeros(len(costs))
    for one in np.unique(layer):
        here = layer == one
        if np.isfinite(costs[here]).all():
            apart[here] = compute_crowding_distances(costs[here])
    order: npt.NDArray[np.int64] = np.lexsort((-apart, layer))
    return order


def _sort_lowest_first(costs: Costs, most_sorted: int | None) -> npt.NDArray[np.int64]:
    """Return the order of costs, shape (individuals,); behind `most`, in any: of 10,000, all would take ten times."""
    if most_sorted is None or most_sorted >= len(costs):
        return np.argsort(costs, kind="stable")
    is_low = costs <= np.partition(costs, most_sorted - 1)[most_sorted - 1]
    lowest = np.flatnonzero(is_low)
    return np.append(lowest[np.argsort(costs[lowest], kind="stable")], np.flatnonzero(~is_low))


def compute_hypervolume(costs: Costs, reference: npt.ArrayLike) -> float:
    """Return the volume of all that some individual dominates and that dominates the reference, of shape (objectives,).

    Each individual adds its own box, without what those behind it dominate of that (While et al., A fast way of
    calculating exact hypervolumes, 2012).
    """
    limit = np.asarray(reference, float)
    inside = costs[(costs < limit).all(axis=1)]
    best = inside[find_non_dominated(inside)]
    if best.shape[1] <= 2:
        return _compute_area(best, limit)
    best = best[np.argsort(-best[:, -1], kind="stable")]  # those behind are as good in the last objective
    flat, height = best[:, :-1], limit[-1] - best[:, -1]
    bases = np.prod(limit[:-1] - flat, axis=1)
    taken = [compute_hypervolume(np.maximum(flat[place:], own), limit[:-1]) for place, own in enumerate(flat, start=1)]
    return float((height * (bases - taken)).sum())


def _compute_area(costs: Costs, limit: Costs) -> float:
    """Return the hypervolume of individuals that do not dominate each other, of one or two objectives."""
    if not len(costs) or costs.shape[1] == 1:
        return float((limit - costs).max(initial=0.0))
    first, second = costs[np.lexsort(costs.T[::-1])].T
    heights = np.append(limit[1], second)
    return float(((limit[0] - first) * (heights[:-1] - second)).sum())
