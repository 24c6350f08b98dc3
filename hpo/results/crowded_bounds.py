"""Find bounds of hyperparameters at which the best evaluations lie."""

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
BEST_COUNT, _MIN_ON_BOUND = 5, 3  # At least 3 of the 5 best evaluations must lie at a bound.
_RANGE_PARTS = 50  # A value in the first or the last fiftieth of a range lies at a bound.

# If a hyperparameter does not matter, the best of a random search lie anywhere in its range. Each
# lies at a given bound with a probability of 2%, and at least three of five with 10 * 0.02^3 = 8e-5
# (the tail of a binomial distribution). Multiplied by the number of all bounds (Bonferroni), this
# is the probability of a false alarm, which must be below 1%. An Int with few values has more
# values at a bound by chance. In a range from 1 to 6, all five must lie there (6^-5 = 1.3e-4). In a
# range from 1 to 3, not even five are enough if there is another number.
_MAX_FALSE_ALARM_RATE = 0.01

# A search that learns has crowded bounds without a cause. Unimportant values are inherited together
# with important ones, and a surrogate explores the edges. So the second condition is that losses
# are lower near the bound, adjusted for all other hyperparameters, by this t statistic. Only the
# first evaluations are used, before the search converges. In simulated searches by `ga`, with 7
# hyperparameters and up to 256 evaluations, 2 to 6% of the searches got wrong advice, mostly about
# bounds close to the optimum. Without the second condition, 9 to 71% of them would get it.
# Evaluations in all, or for each hyperparameter: the larger number.
_FIRST_EVALUATIONS, _FIRST_PER_PARAMETER = 48, 4
_MIN_T_STATISTIC = 3.0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CrowdedBound:
    """A bound of a hyperparameter at which several of the best evaluations lie."""

    name: str
    """The name of the hyperparameter."""
    bound: float
    """The value of the bound."""
    is_upper: bool
    """Whether it is the upper bound."""
    count: int
    """How many of the 5 best evaluations lie at the bound."""


def find_crowded_bounds(
    ranked: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> list[CrowdedBound]:
    """Return the bounds of hyperparameters at which the best evaluations lie.

    At least 3 of the 5 best evaluations must lie at a bound, which must be unlikely by chance.
    Losses must also be significantly lower near the best value of the hyperparameter.

    Args:
        ranked: All complete evaluations, best first.
        distributions: The Optuna distribution of each hyperparameter by its name.
    """
    if len(ranked) < _MIN_COMPLETE:
        return []
    numbers = {
        name: kind
        for name, kind in distributions.items()
        if hasattr(kind, "low") and kind.low < kind.high
    }
    crowded = [
        CrowdedBound(
            name,
            kind.high if upper else kind.low,
            upper,
            _count_on_bound(ranked[:BEST_COUNT], name, kind, upper),
        )
        for name, kind in numbers.items()
        for upper in (False, True)
        if _can_widen(kind, upper)
    ]
    found = [
        edge for edge in crowded if _is_significant(edge, numbers[edge.name], 2 * len(numbers))
    ]
    return [
        edge
        for edge in found
        if _compute_t_statistic(ranked, distributions, edge.name) > _MIN_T_STATISTIC
    ]


def _can_widen(distribution: Any, upper: bool) -> bool:
    """Return whether a range can be widened at its upper or lower bound. Integers on a logarithmic scale begin at 1."""
    return upper or not (
        distribution.log and isinstance(distribution.low, int) and distribution.low <= 1
    )


def _is_significant(edge: CrowdedBound, distribution: Any, bounds: int) -> bool:
    steps = _count_steps(distribution)
    share = 1 / _RANGE_PARTS if steps is None else (steps // _RANGE_PARTS + 1) / (steps + 1)
    tail = sum(
        math.comb(BEST_COUNT, k) * share**k * (1 - share) ** (BEST_COUNT - k)
        for k in range(edge.count, BEST_COUNT + 1)
    )
    return edge.count >= _MIN_ON_BOUND and tail * bounds < _MAX_FALSE_ALARM_RATE


def _count_on_bound(best: Sequence[Evaluation], name: str, distribution: Any, upper: bool) -> int:
    positions = [_scale_value(e.params[name], distribution) for e in best if name in e.params]
    steps = _count_steps(distribution)
    width = 1 / _RANGE_PARTS if steps is None else steps // _RANGE_PARTS / steps
    return sum((1 - position if upper else position) <= width + _ROUNDING for position in positions)


def _count_steps(distribution: Any) -> int | None:
    """Return the number of steps between the bounds; None for a continuous or logarithmic scale."""
    width = distribution.high - distribution.low
    return round(width / distribution.step) if distribution.step and not distribution.log else None


def _scale_value(value: float, distribution: Any) -> float:
    """Return the position of a value in its range, from 0 to 1, linear or logarithmic."""
    low, high = distribution.low, distribution.high
    if distribution.log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    width = high / 2 - low / 2  # Halves, because the difference of two floats may overflow.
    return (value / 2 - low / 2) / width if width else 0.5


def _compute_t_statistic(
    ranked: Sequence[Evaluation], distributions: Mapping[str, Any], name: str
) -> float:
    """Return the t statistic of one hyperparameter in a linear model of the losses.

    The model replaces each loss by its position in the sorted losses. It predicts the position from
    the distances to the best evaluation, one for each hyperparameter. The result is 0 if there are
    too few evaluations, or if the distances in this hyperparameter are a linear combination of the
    other distances.
    """
    import numpy as np

    count = max(_FIRST_EVALUATIONS, _FIRST_PER_PARAMETER * len(distributions))
    first = sorted(evaluation.trial for evaluation in ranked)[:count]
    early = [evaluation for evaluation in ranked if evaluation.trial <= first[-1]]
    distances = {
        key: _compute_distances(early, ranked[0], key, kind) for key, kind in distributions.items()
    }
    own = np.array(distances.pop(name))
    others = np.array([[1.0] * len(early), *distances.values()]).T
    freedom = len(early) - others.shape[1] - 1
    rest, losses = (
        _compute_residuals(others, values) for values in (own, np.arange(len(early), dtype=float))
    )
    lengths = [float(np.linalg.norm(values)) for values in (rest, losses)]
    if freedom < 1 or min(lengths) < _ROUNDING:
        return 0.0
    correlation = float(rest @ losses) / math.prod(lengths)
    return correlation * math.sqrt(freedom / max(_ROUNDING, 1 - correlation**2))


def _compute_residuals(others: Vector, values: Vector) -> Vector:
    """Return the residuals of a linear model of `values` on the columns of `others`."""
    import numpy as np

    rest: Vector = values - others @ np.linalg.lstsq(others, values, rcond=None)[0]
    return rest


def _compute_distances(
    evaluations: Sequence[Evaluation], best: Evaluation, name: str, distribution: Any
) -> list[float]:
    """Return the distances of evaluations from the best in one hyperparameter, from 0 to 1.

    The distance is 0 if the hyperparameter is inactive in one of the two evaluations. Then the two
    differ in another hyperparameter, on which its condition depends.
    """
    target: Any = best.params.get(name)
    values = [evaluation.params.get(name, target) for evaluation in evaluations]
    if target is None:
        return [0.0] * len(values)
    if not hasattr(distribution, "low"):
        return [float(value != target) for value in values]
    return [
        abs(_scale_value(value, distribution) - _scale_value(target, distribution))
        for value in values
    ]
