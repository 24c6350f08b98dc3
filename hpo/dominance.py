"""Compare individuals by several objectives: dominance, crowding distance and hypervolume.

Costs are arrays of shape (individuals, objectives), lower is better. Results have the shape
(individuals,). Individual A dominates individual B if no cost of A is higher, and at least one is
lower.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


def find_non_dominated(costs: Costs) -> npt.NDArray[np.bool_]:
    """Return a mask of the individuals that no other individual dominates.

    Individuals with equal costs do not dominate each other.
    """
    if costs.shape[1] == 2 and len(costs):
        # In the order of the first cost, the second cost must be lower than that of all earlier
        # individuals.
        pairs, pair_indices = np.unique(costs, axis=0, return_inverse=True)
        lowest = np.minimum.accumulate(pairs[:, 1])
        best: npt.NDArray[np.bool_] = np.append(True, pairs[1:, 1] < lowest[:-1])
        return best[pair_indices.ravel()]
    # In this order, no individual is dominated by a later one.
    remaining = np.lexsort(costs.T[::-1])
    index = 0
    while index < len(remaining):
        own = costs[remaining[index]]
        others = costs[remaining]
        kept = ~((others >= own).all(axis=1) & (others > own).any(axis=1))
        remaining = remaining[kept]
        index = int(kept[:index].sum()) + 1
    found = np.zeros(len(costs), bool)
    found[remaining] = True
    return found


def compute_domination_ranks(costs: Costs, most_ranked: int | None = None) -> npt.NDArray[np.int64]:
    """Return the front of each individual: 0 if none dominates it, 1 if only front 0 does, etc.

    If `most_ranked` is given, stop when at least this number of individuals have a front. All
    remaining individuals then get the number of the next front.
    """
    fronts = np.zeros(len(costs), np.int64)
    remaining = np.arange(len(costs))
    front = 0
    while len(remaining) and (most_ranked is None or len(costs) - len(remaining) < most_ranked):
        is_in_front = find_non_dominated(costs[remaining])
        fronts[remaining[is_in_front]] = front
        remaining = remaining[~is_in_front]
        front += 1
    fronts[remaining] = front
    return fronts


def compute_crowding_distances(costs: Costs) -> npt.NDArray[np.float64]:
    """Return the crowding distances of a front: how far apart the neighbours on the front are.

    Costs must be finite. The distance is infinite for individuals at the ends of the front. Source:
    Deb et al., A fast and elitist multiobjective genetic algorithm: NSGA-II (2002), section III-B.
    """
    distances = np.zeros(len(costs))
    # Without the division, the difference of two large floats could overflow.
    for column in costs.T / 2:
        order = np.argsort(column, kind="stable")
        span = column[order[-1]] - column[order[0]] if len(order) else 0.0
        if span > 0:
            distances[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / span
            distances[order[[0, -1]]] = np.inf
    return distances


def sort_best_first(costs: Costs, most_sorted: int | None = None) -> npt.NDArray[np.int64]:
    """Return the indices of individuals from best to worst, in the order of NSGA-II.

    Individuals of a better front come first. Within a front, individuals with a larger crowding
    distance come first. If `most_sorted` is given, only this number of best individuals is sorted.
    The other individuals follow in any order.
    """
    if costs.shape[1] == 1:
        losses = costs[:, 0]
        # A complete sort of 10,000 losses takes ten times as long as a partition.
        if most_sorted is None or most_sorted >= len(losses):
            return np.argsort(losses, kind="stable")
        is_low = losses <= np.partition(losses, most_sorted - 1)[most_sorted - 1]
        lowest = np.flatnonzero(is_low)
        lowest = lowest[np.argsort(losses[lowest], kind="stable")]
        return np.append(lowest, np.flatnonzero(~is_low))
    fronts = compute_domination_ranks(costs, most_sorted)
    distances = np.zeros(len(costs))
    for front in np.unique(fronts):
        is_in_front = fronts == front
        if np.isfinite(costs[is_in_front]).all():
            distances[is_in_front] = compute_crowding_distances(costs[is_in_front])
    order: npt.NDArray[np.int64] = np.lexsort((-distances, fronts))
    return order


def compute_hypervolume(costs: Costs, reference: npt.ArrayLike) -> float:
    """Return the hypervolume: the volume that the individuals dominate, up to the reference point.

    Individuals that are not better than the reference point in all objectives are ignored. With
    three or more objectives, individuals are sorted by the last objective, the worst first. Each
    adds the box that it dominates, without the part that later individuals dominate. Source: While
    et al., A fast way of calculating exact hypervolumes (2012).
    """
    limit = np.asarray(reference, float)
    inside = costs[(costs < limit).all(axis=1)]
    best = inside[find_non_dominated(inside)]
    if not len(best) or best.shape[1] == 1:
        return float((limit - best).max(initial=0.0))
    if best.shape[1] == 2:
        first, second = best[np.lexsort(best.T[::-1])].T
        heights = np.append(limit[1], second)
        return float(((limit[0] - first) * (heights[:-1] - second)).sum())
    # Later ones are at least as good in the last objective.
    best = best[np.argsort(-best[:, -1], kind="stable")]
    flat = best[:, :-1]
    height = limit[-1] - best[:, -1]
    bases = np.prod(limit[:-1] - flat, axis=1)
    taken = [
        compute_hypervolume(np.maximum(flat[index:], own), limit[:-1])
        for index, own in enumerate(flat, start=1)
    ]
    return float((height * (bases - taken)).sum())
