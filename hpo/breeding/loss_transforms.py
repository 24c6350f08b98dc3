"""Select the evaluations that Gaussian processes learn from, and transform their losses."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import ndtri

from hpo.breeding.gaussian_process import Vector
from hpo.dominance import sort_best_first

_MOST_EVALUATIONS = 256  # The time to learn grows with the cube of the number of evaluations.
_POWER_BOUNDS = (-3.0, 3.0)
_LARGEST_LOG = 50.0  # Limit of the logarithm of the distance of a loss from the median.


def select_learned(costs: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of the evaluations that a model learns from.

    These are all evaluations if there are at most 256. Otherwise, they are the latest 128, and the
    best 128 of the earlier evaluations.

    Args:
        costs: The costs of all evaluations, shape `(evaluations, objectives)`.
    """
    half = _MOST_EVALUATIONS // 2
    if len(costs) <= _MOST_EVALUATIONS:
        return np.arange(len(costs))
    last = np.arange(len(costs) - half, len(costs))
    return np.append(np.sort(sort_best_first(costs[:-half], half)[:half]), last)


def compute_normal_scores(losses: Vector) -> Vector:
    """Return the normal scores of losses: the quantiles of the normal distribution at their ranks.

    Equal losses have the same score. Losses may be infinite.
    """
    scores: Vector = ndtri(rank_values(losses) / len(losses))
    return scores


def rank_values(values: Vector) -> Vector:
    """Return the ranks of values, from 0.5. Equal values have the mean of their ranks."""
    # The ranks are computed here, because scipy.stats takes 0.2 s to import.
    _, ranks, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Vector = (np.cumsum(counts) - counts / 2)[ranks]
    return means


def apply_power_transform(losses: Vector) -> Vector:
    """Transform losses by a power, so that they are nearly normally distributed.

    The result has mean 0 and variance 1. Infinite losses count as the highest finite loss. First,
    the median is subtracted from the losses, and they are divided by the median of their absolute
    values. The method is described by Yeo and Johnson, A new family of power transformations to
    improve normality or symmetry (2000), equation 2.1.
    """
    succeeded = np.isfinite(losses)
    if not succeeded.any():
        return np.zeros(len(losses))
    finite = np.where(succeeded, losses, losses[succeeded].max())
    with np.errstate(over="ignore"):
        centered = np.clip(finite - np.median(finite), -1e300, 1e300)
        scaled = centered / (np.median(np.abs(centered)) or np.mean(np.abs(centered)) or 1.0)
    logs = np.minimum(np.log1p(np.abs(scaled)), _LARGEST_LOG) * np.sign(scaled)

    def compute_misfit(power: float) -> float:
        """Return -log p(losses | power) up to a constant (equation 3.1)."""
        variance = max(float(np.var(_apply_yeo_johnson(logs, power))), 1e-300)
        return float(len(logs) / 2 * math.log(variance) - (power - 1) * logs.sum())

    power = minimize_scalar(compute_misfit, bounds=_POWER_BOUNDS, method="bounded").x
    transformed = _apply_yeo_johnson(logs, power)
    standardized: Vector = (transformed - transformed.mean()) / (transformed.std() or 1.0)
    return standardized


def _apply_yeo_johnson(logs: Vector, power: float) -> Vector:
    """Return the Yeo-Johnson transformation of values, given as log(1 + |value|) * sign(value)."""
    above = np.expm1(power * logs) / power if power else logs
    below = np.expm1((power - 2) * logs) / (power - 2) if power != 2 else logs
    return np.where(logs >= 0, above, below)
