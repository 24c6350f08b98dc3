"""Bounds of hyperparameters on which the best evaluations lie, where that is no chance and makes a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.store.evaluations import Evaluation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float64]

_MIN_COMPLETE = 20
BEST_COUNT, _MIN_ON_BOUND = 5, 3  # of the best, so many have to lie on a bound
_RANGE_PARTS = 50  # of a range: what is in the first or the last part lies on a bound

# Where a hyperparameter does not matter, the best of a random search lie anywhere in its range: each with a chance of
# 2% on this bound, and three of five with one of 10 * 0.02^3 = 8e-5 (the tail of a binomial distribution). That times
# the number of all bounds (Bonferroni) is the chance that any of them looks so: 1% at most. Of an Int with few values,
# more lie on a bound by chance: from 1 to 6, all five have to (6^-5 = 1.3e-4), and from 1 to 3, beside another number,
# not even five are enough.
_MAX_FALSE_ALARM_RATE = 0.01

# A search that learns crowds on bounds without a cause: what does not matter is inherited with what does, and a model
# explores the edges. So it has to matter, too: losses are lower near the bound, all other hyperparameters taken into
# account, with this t statistic. The first evaluations tell it, before the search settles. In simulated searches by
# `ga`, with 7 hyperparameters and up to 256 evaluations, 2 to 6% got this advice about a bound that the best lies
# inside of, most of them where it is near by; without the second condition, it would be 9 to 71%.
_FIRST_EVALUATIONS, _FIRST_PER_PARAMETER = 48, 4  # evaluations, or so many for each hyperparameter
_MIN_T_STATISTIC = 3.0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CrowdedBound:
    """A bound, and how many of the best lie on it; `upper` tells which of the two it is."""

    name: str
    bound: float
    is_upper: bool
    count: int


def find_crowded_bounds(ranked: Sequence[Evaluation], distributions: Mapping[str, Any]) -> list[CrowdedBound]:
    """Return the bounds on which the best evaluations lie; `ranked` are all that are complete, best first."""
    if len(ranked) < _MIN_COMPLETE:
        return []
    numbers = {name: one for name, one in distributions.items() if hasattr(one, "low") and one.low < one.high}
    crowded = [
        CrowdedBound(
            name, one.high if upper else one.low, upper, _count_on_bound(ranked[:BEST_COUNT], name, one, upper)
        )
        for name, one in numbers.items()
        for upper in (False, True)
        if _can_widen(one, upper)
    ]
    found = [edge for edge in crowded if _is_significant(edge, numbers[edge.name], 2 * len(numbers))]
    return [edge for edge in found if _compute_t_statistic(ranked, distributions, edge.name) > _MIN_T_STATISTIC]


def _can_widen(distribution: Any, upper: bool) -> bool:
    """Tell whether there are values beyond a bound: below 1, a logarithmic scale has no integers."""
    return upper or not (distribution.log and isinstance(distribution.low, int) and distribution.low <= 1)


def _is_significant(edge: CrowdedBound, distribution: Any, bounds: int) -> bool:
    steps = _count_steps(distribution)
    share = 1 / _RANGE_PARTS if steps is None else (steps // _RANGE_PARTS + 1) / (steps + 1)
    tail = sum(
        math.comb(BEST_COUNT, k) * share**k * (1 - share) ** (BEST_COUNT - k) for k in range(edge.count, BEST_COUNT + 1)
    )
    return edge.count >= _MIN_ON_BOUND and tail * bounds < _MAX_FALSE_ALARM_RATE


def _count_on_bound(best: Sequence[Evaluation], name: str, distribution: Any, upper: bool) -> int:
    places = [_scale_value(one.params[name], distribution) for one in best if name in one.params]
    steps = _count_steps(distribution)
    width = 1 / _RANGE_PARTS if steps is None else steps // _RANGE_PARTS / steps
    return sum((1 - place if upper else place) <= width + _ROUNDING for place in places)


def _count_steps(distribution: Any) -> int | None:
    """Return how many steps there are from one bound to the other; None where there are none, or on a log scale."""
    width = distribution.high - distribution.low
    return round(width / distribution.step) if distribution.step and not distribution.log else None


def _scale_value(value: float, distribution: Any) -> float:
    """Return where a value lies in its range, from 0 to 1, on the scale that is searched."""
    low, high = distribution.low, distribution.high
    if distribution.log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    width = high / 2 - low / 2  # halves: the difference of two floats may be none
    return (value / 2 - low / 2) / width if width else 0.5


def _compute_t_statistic(ranked: Sequence[Evaluation], distributions: Mapping[str, Any], name: str) -> float:
    """Return the t statistic of how the rank of the loss grows with the distance from the best in one hyperparameter.

    It is that of a linear model of the distances in all hyperparameters; 0 where there are too few evaluations for one,
    or where those that are far from the best in this one are so in others, too.
    """
    import numpy as np

    first = sorted(one.trial for one in ranked)[: max(_FIRST_EVALUATIONS, _FIRST_PER_PARAMETER * len(distributions))]
    early = [one for one in ranked if one.trial <= first[-1]]
    distances = {other: _compute_distances(early, ranked[0], other, one) for other, one in distributions.items()}
    own = np.array(distances.pop(name))
    others = np.array([[1.0] * len(early), *distances.values()]).T
    freedom = len(early) - others.shape[1] - 1
    rest, losses = (_compute_residuals(others, values) for values in (own, np.arange(len(early), dtype=float)))
    lengths = [float(np.linalg.norm(values)) for values in (rest, losses)]
    if freedom < 1 or min(lengths) < _ROUNDING:
        return 0.0
    correlation = float(rest @ losses) / math.prod(lengths)
    return correlation * math.sqrt(freedom / max(_ROUNDING, 1 - correlation**2))


def _compute_residuals(others: Vector, values: Vector) -> Vector:
    """Return what a linear model of some columns does not explain of values."""
    import numpy as np

    rest: Vector = values - others @ np.linalg.lstsq(others, values, rcond=None)[0]
    return rest


def _compute_distances(
    evaluations: Sequence[Evaluation], best: Evaluation, name: str, distribution: Any
) -> list[float]:
    """Return how far evaluations are from the best in one hyperparameter, from 0 to 1.

    Where one of the two does not have it, the difference lies in what it depends on, and nothing is said here.
    """
    there: Any = best.params.get(name)
    values = [one.params.get(name, there) for one in evaluations]
    if there is None:
        return [0.0] * len(values)
    if not hasattr(distribution, "low"):
        return [float(value != there) for value in values]
    return [abs(_scale_value(value, distribution) - _scale_value(there, distribution)) for value in values]
