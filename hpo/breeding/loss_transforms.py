"""What Gaussian processes learn: which evaluations, and their losses as places in an order, or as normal as can be."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import ndtri

from hpo.breeding.gaussian_process import Vector
from hpo.dominance import sort_best_first

_MOST_EVALUATIONS = 256  # that are learned from: the time grows with the cube of their number
_POWER_BOUNDS = (-3.0, 3.0)
_LARGEST_LOG = 50.0  # of how far a loss is from the median: what is farther is as far


def select_learned(costs: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of the evaluations that are learned from, of costs of shape (evaluations, objectives).

    These are all, or of more than `_MOST`, the last ones and the best of the others, half each.
    """
    half = _MOST_EVALUATIONS // 2
    if len(costs) <= _MOST_EVALUATIONS:
        return np.arange(len(costs))
    last = np.arange(len(costs) - half, len(costs))
    return np.append(np.sort(sort_best_first(costs[:-half], half)[:half]), last)


def compute_normal_scores(losses: Vector) -> Vector:
    """Return the quantile of each loss's place in the order of losses, of a normal distribution; equal ones share one.

    Losses may be infinite.
    """
    # scipy.stats, which has a function for the places, takes 0.2 s to import.
    _, places, counts = np.unique(losses, return_inverse=True, return_counts=True)
    scores: Vector = ndtri((np.cumsum(counts) - counts / 2)[places] / len(places))
    return scores


def apply_power_transform(losses: Vector) -> Vector:
    """Return losses, transformed to be as normal as can be, of mean 0 and variance 1; an infinite one is the worst.

    Yeo and Johnson, A new family of power transformations to improve normality or symmetry (2000), equation 2.1, of
    losses whose median is 0 and whose typical distance from it is 1.
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
        """Return -log p(losses | power) but for a constant (equation 3.1)."""
        variance = np.var(_apply_yeo_johnson(logs, power))
        return float(len(logs) / 2 * math.log(max(float(variance), 1e-300)) - (power - 1) * logs.sum())

    transformed = _apply_yeo_johnson(logs, minimize_scalar(compute_misfit, bounds=_POWER_BOUNDS, method="bounded").x)
    standardized: Vector = (transformed - transformed.mean()) / (transformed.std() or 1.0)
    return standardized


def _apply_yeo_johnson(logs: Vector, power: float) -> Vector:
    """Transform values, whose log(1 + |value|) * sign(value) are given."""
    above = np.expm1(power * logs) / power if power else logs
    below = np.expm1((power - 2) * logs) / (power - 2) if power != 2 else logs
    return np.where(logs >= 0, above, below)
