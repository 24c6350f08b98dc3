"""Find bounds of hyperparameters at which the best evaluations lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.store.evaluations import Evaluation

_MIN_COMPLETE = 20
BEST_COUNT = 5  # At least 3 of the 5 best evaluations must lie at a bound.
_MIN_ON_BOUND = 3
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
_FIRST_EVALUATIONS = 48
_FIRST_PER_PARAMETER = 4
_MIN_T_STATISTIC = 3.0
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CrowdedBound:
    """The upper or lower bound of a hyperparameter, at which several of the best lie."""

    name: str
    bound: float
    is_upper: bool
    count: int
    """How many of the 5 best evaluations lie at the bound."""


def find_crowded_bounds(
    ranked: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> list[CrowdedBound]:
    """Return the bounds of hyperparameters at which the best evaluations lie.

    At least 3 of the 5 best evaluations must lie at a bound, which must be unlikely by chance.
    Losses must also be significantly lower near the best value of the hyperparameter. `ranked` are
    all complete evaluations, best first.
    """
    if len(ranked) < _MIN_COMPLETE:
        return []
    numbers = {
        name: distribution
        for name, distribution in distributions.items()
        if hasattr(distribution, "low") and distribution.low < distribution.high
    }
    found = []
    for name, distribution in numbers.items():
        values = [e.params[name] for e in ranked[:BEST_COUNT] if name in e.params]
        # Integers on a logarithmic scale begin at 1, so that this bound cannot be moved.
        is_at_one = isinstance(distribution.low, int) and distribution.low <= 1
        bounds = {True: distribution.high}
        if not (distribution.log and is_at_one):
            bounds = {False: distribution.low, True: distribution.high}
        for is_upper, bound in bounds.items():
            count = _count_on_bound(values, distribution, is_upper)
            tail = _compute_tail(count, distribution)
            if (
                count >= _MIN_ON_BOUND
                and tail * 2 * len(numbers) < _MAX_FALSE_ALARM_RATE
                and _compute_t_statistic(ranked, distributions, name) > _MIN_T_STATISTIC
            ):
                found.append(CrowdedBound(name, bound, is_upper, count))
    return found


def _count_on_bound(values: Sequence[float], distribution: Any, is_upper: bool) -> int:
    positions = [_scale_value(value, distribution) for value in values]
    steps = _count_steps(distribution)
    width = 1 / _RANGE_PARTS if steps is None else steps // _RANGE_PARTS / steps
    distances = [1 - position if is_upper else position for position in positions]
    return sum(distance <= width + _ROUNDING for distance in distances)


def _compute_tail(count: int, distribution: Any) -> float:
    """Return the probability that at least `count` of the best lie at a given bound by chance."""
    steps = _count_steps(distribution)
    share = 1 / _RANGE_PARTS if steps is None else (steps // _RANGE_PARTS + 1) / (steps + 1)
    return sum(
        math.comb(BEST_COUNT, k) * share**k * (1 - share) ** (BEST_COUNT - k)
        for k in range(count, BEST_COUNT + 1)
    )


def _count_steps(distribution: Any) -> int | None:
    """Return the number of steps between the bounds; None for a continuous or logarithmic scale."""
    width = distribution.high - distribution.low
    return round(width / distribution.step) if distribution.step and not distribution.log else None


def _scale_value(value: float, distribution: Any) -> float:
    """Return the position of a value in its range, from 0 to 1, linear or logarithmic."""
    low = distribution.low
    high = distribution.high
    if distribution.log:
        value = math.log(value)
        low = math.log(low)
        high = math.log(high)
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
    count = max(_FIRST_EVALUATIONS, _FIRST_PER_PARAMETER * len(distributions))
    last = sorted(evaluation.trial for evaluation in ranked)[:count][-1]
    early = [evaluation for evaluation in ranked if evaluation.trial <= last]
    distances = {
        key: _compute_distances(early, ranked[0].params.get(key), key, distribution)
        for key, distribution in distributions.items()
    }
    # Own distances and losses are adjusted for all other hyperparameters: residuals are left.
    adjusted = np.column_stack([distances.pop(name), np.arange(len(early))])
    others = np.column_stack([np.ones(len(early)), *distances.values()])
    residuals = adjusted - others @ np.linalg.lstsq(others, adjusted, rcond=None)[0]
    freedom = len(early) - others.shape[1] - 1
    lengths = np.linalg.norm(residuals, axis=0)
    if freedom < 1 or lengths.min() < _ROUNDING:
        return 0.0
    correlation = float(residuals[:, 0] @ residuals[:, 1] / lengths.prod())
    return correlation * math.sqrt(freedom / max(_ROUNDING, 1 - correlation**2))


def _compute_distances(
    evaluations: Sequence[Evaluation], target: Any, name: str, distribution: Any
) -> npt.NDArray[np.float64]:
    """Return the distances of evaluations from the best (`target`) in one hyperparameter, up to 1.

    The distance is 0 if the hyperparameter is inactive in one of the two evaluations. Then the two
    differ in another hyperparameter, on which its condition depends.
    """
    if target is None:
        return np.zeros(len(evaluations))
    values = [evaluation.params.get(name, target) for evaluation in evaluations]
    if not hasattr(distribution, "low"):
        return np.array([value != target for value in values], float)
    positions = np.array([_scale_value(value, distribution) for value in values])
    return np.abs(positions - _scale_value(target, distribution))
