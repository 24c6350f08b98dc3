"""Compare individuals by several objectives: dominance, crowding distance and hypervolume.

Costs are arrays of shape (individuals, objectives), lower is better. Individual A dominates
individual B if no cost of A is higher, and at least one is lower.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]


def find_non_dominated(costs: Costs) -> npt.NDArray[np.bool_]:
    """Return a mask of the individuals that no other individual dominates, shape (individuals,).

    Individuals with equal costs do not dominate each other.

    Args:
        costs: The costs, shape (individuals, objectives).
    """
    if costs.shape[1] == 2 and len(costs):
        return _find_non_dominated_pairs(costs)
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


def _find_non_dominated_pairs(costs: Costs) -> npt.NDArray[np.bool_]:
    # In the order of the first cost, the second cost must be lower than that of all earlier
    # individuals.
    pairs, pair_indices = np.unique(costs, axis=0, return_inverse=True)
    lowest = np.minimum.accumulate(pairs[:, 1])
    kept: npt.NDArray[np.bool_] = np.append(True, pairs[1:, 1] < lowest[:-1])[pair_indices.ravel()]
    return kept


def compute_domination_ranks(costs: Costs, most_ranked: int | None = None) -> npt.NDArray[np.int64]:
    """Return the front of each individual: 0 if none dominates it, 1 if only front 0 does, etc.

    Args:
        costs: The costs, shape (individuals, objectives).
        most_ranked: Stop when at least this number of individuals have a front. All remaining
            individuals then get the number of the next front. Default: None, rank all individuals.

    Returns:
        The number of the front, shape (individuals,).
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

    The distance is infinite for individuals at the ends of the front. Source: Deb et al., A fast
    and elitist multiobjective genetic algorithm: NSGA-II (2002), section III-B.

    Args:
        costs: Finite costs, shape (individuals, objectives).

    Returns:
        The distances, shape (individuals,).
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
    distance come first.

    Args:
        costs: The costs, shape (individuals, objectives).
        most_sorted: The number of best individuals to sort. The other individuals follow in any
            order. Default: None, sort all.

    Returns:
        The indices, shape (individuals,).
    """
    if costs.shape[1] == 1:
        return _sort_lowest_first(costs[:, 0], most_sorted)
    fronts = compute_domination_ranks(costs, most_sorted)
    distances = np.zeros(len(costs))
    for front in np.unique(fronts):
        is_in_front = fronts == front
        if np.isfinite(costs[is_in_front]).all():
            distances[is_in_front] = compute_crowding_distances(costs[is_in_front])
    order: npt.NDArray[np.int64] = np.lexsort((-distances, fronts))
    return order


def _sort_lowest_first(costs: Costs, most_sorted: int | None) -> npt.NDArray[np.int64]:
    # A complete sort of 10,000 costs takes ten times as long as a partition.
    if most_sorted is None or most_sorted >= len(costs):
        return np.argsort(costs, kind="stable")
    is_low = costs <= np.partition(costs, most_sorted - 1)[most_sorted - 1]
    lowest = np.flatnonzero(is_low)
    return np.append(lowest[np.argsort(costs[lowest], kind="stable")], np.flatnonzero(~is_low))


def compute_hypervolume(costs: Costs, reference: npt.ArrayLike) -> float:
    """Return the hypervolume: the volume that the individuals dominate, up to the reference point.

    Individuals that are not better than the reference point in all objectives are ignored. With
    three or more objectives, individuals are sorted by the last objective, the worst first. Each
    adds the box that it dominates, without the part that later individuals dominate. Source: While
    et al., A fast way of calculating exact hypervolumes (2012).

    Args:
        costs: Shape (individuals, objectives).
        reference: The reference point, shape (objectives,).
    """
    limit = np.asarray(reference, float)
    inside = costs[(costs < limit).all(axis=1)]
    best = inside[find_non_dominated(inside)]
    if best.shape[1] <= 2:
        return _compute_area(best, limit)
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


def _compute_area(costs: Costs, limit: Costs) -> float:
    # One or two objectives; no individual dominates another.
    if not len(costs) or costs.shape[1] == 1:
        return float((limit - costs).max(initial=0.0))
    first, second = costs[np.lexsort(costs.T[::-1])].T
    heights = np.append(limit[1], second)
    return float(((limit[0] - first) * (heights[:-1] - second)).sum())
