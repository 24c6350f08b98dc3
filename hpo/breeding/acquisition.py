"""Acquisition functions: the merit of candidates, computed from the predictions of models.

An acquisition function takes means and standard deviations, both of shape `(objectives,
candidates)`. It returns merits of shape `(candidates,)`. The higher a merit, the better the
candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import erfcx, ndtr

from hpo.breeding.gaussian_process import GaussianProcess, Vector
from hpo.dominance import find_non_dominated

# Distance of the lower confidence bound from the mean, in standard deviations.
_BOUND_DEVIATIONS = 3.0
_RAYS = 64
# Distance of the reference point from the front, as a share of the extent of the front.
_MARGIN = 0.1
# Smooths the gain at 0, so that a candidate without a gain is better the closer it is to the front.
_SMOOTHING = 0.01
# The same for the gain of a bound, in standard deviations of the learned values.
_BOUND_SMOOTHING = 0.1
_FAR = -30.0

Acquisition = Callable[[Vector, Vector], Vector]


def lower_confidence_bound(
    models: Sequence[GaussianProcess], rng: np.random.Generator, lowest: float | None = None
) -> Acquisition:
    """Return an acquisition function that prefers candidates with a low lower confidence bound.

    The bound is the mean minus 3 standard deviations. For several objectives, the function prefers
    candidates whose bounds add the largest hypervolume to the front of the means. The method is
    described by Srinivas et al., Gaussian process optimization in the bandit setting (2010).

    Args:
        models: The fitted model of each objective.
        lowest: The mean to improve on; unused for several objectives. Default: the lowest mean at
            the points that the model has learned.
    """
    if len(models) == 1:
        best = models[0].lowest_mean if lowest is None else lowest
        return lambda mean, deviation: _log_softplus(
            (best - mean[0] + _BOUND_DEVIATIONS * deviation[0]) / _BOUND_SMOOTHING
        )
    gain = HypervolumeImprovement(np.array([model.means for model in models]), rng)
    return lambda mean, deviation: gain((mean - _BOUND_DEVIATIONS * deviation)[None])


def expected_improvement(
    models: Sequence[GaussianProcess], rng: np.random.Generator, lowest: float | None = None
) -> Acquisition:
    """Return an acquisition function that prefers the largest expected improvement on `lowest`.

    For several objectives, it prefers the largest expected hypervolume improvement, averaged over
    random draws from the predictions. The method is described by Jones et al., Efficient global
    optimization of expensive black-box functions (1998), equation 15.

    Args:
        models: The fitted model of each objective.
        lowest: The mean to improve on; unused for several objectives. Default: the lowest mean at
            the points that the model has learned.
    """
    if len(models) == 1:
        best = models[0].lowest_mean if lowest is None else lowest
        return lambda mean, deviation: (
            np.log(deviation[0]) + log_expected_improvement((best - mean[0]) / deviation[0])
        )
    gain = HypervolumeImprovement(np.array([model.means for model in models]), rng)
    drawn = rng.standard_normal((_RAYS, len(models), 1))
    return lambda mean, deviation: gain(mean + deviation * drawn)


class HypervolumeImprovement:
    """Computes the hypervolume that candidates would add to a Pareto front of any dimension.

    Rays in random directions start at the reference point. The reach of a front along a ray is a
    power of the distance to the front. The exponent is the number of objectives. The hypervolume is
    proportional to the average reach of all rays (Golovin and Zhang, Random hypervolume
    scalarizations for provable multi-objective black box optimization, 2020, lemma 5). So a
    candidate adds the average reach by which it exceeds the front.

    Args:
        known: The predicted means of the known individuals, which form the front, shape
            `(objectives, individuals)`.
    """

    def __init__(self, known: Vector, rng: np.random.Generator) -> None:
        self._reference = compute_reference_point(known)[:, None]
        span = self._reference - known.min(axis=1, keepdims=True)
        rays = np.abs(rng.standard_normal((_RAYS, len(known), 1)))
        rays /= np.linalg.norm(rays, axis=1, keepdims=True)
        self._steps = rays * np.where(span > 0, span, 1.0)
        self._front_reach = self._measure_reach(known[None]).max(axis=1, keepdims=True)

    def __call__(self, costs: Vector) -> Vector:
        """Return the logarithm of the hypervolume that each candidate adds, shape `(candidates,)`.

        Args:
            costs: The predicted costs of the candidates, shape `(rays, objectives, candidates)` if
                each ray has its own random draw from the predictions. Otherwise, the shape is `(1,
                objectives, candidates)`.
        """
        ahead = (self._measure_reach(costs) - self._front_reach) / _SMOOTHING
        gained: Vector = np.logaddexp.reduce(_log_softplus(ahead), axis=0)
        return gained

    def _measure_reach(self, costs: Vector) -> Vector:
        """Return the reach of candidates along rays, shape `(rays, candidates)`."""
        far = ((self._reference - costs) / self._steps).min(axis=1)
        reached: Vector = np.copysign(np.abs(far) ** len(self._reference), far)
        return reached


def _log_softplus(values: Vector) -> Vector:
    """Return log(log(1 + exp(values))). Its limit far below zero is `values`."""
    return np.where(values < _FAR, values, np.log(np.logaddexp(0.0, np.maximum(values, _FAR))))


def compute_reference_point(known: Vector) -> Vector:
    """Return the reference point, from which hypervolumes are measured.

    In each objective, the point is higher than the highest mean of the front, by a tenth of the
    range of the front. If the median of all known means is even higher, the point is at the median.

    Args:
        known: The known means, shape `(objectives, individuals)`.

    Returns:
        The costs of the reference point, shape `(objectives,)`.
    """
    front = known[:, find_non_dominated(known.T)]
    ideal, worst = front.min(axis=1), front.max(axis=1)
    reference: Vector = np.maximum(worst + _MARGIN * (worst - ideal), np.median(known, axis=1))
    return reference


def log_expected_improvement(standardized: Vector) -> Vector:
    """Return the logarithm of the expected improvement, for a standard deviation of 1.

    It is log(density(z) + z * distribution(z)) of the standard normal distribution. It is accurate
    even if z is far below zero (Ament et al., Unexpected improvements to expected improvement for
    Bayesian optimization, 2023, equation 9).

    Args:
        standardized: The values of z: predicted improvements, divided by their standard deviations.
    """
    z = np.minimum(standardized, -1.0)
    density = -(z**2) / 2 - math.log(2 * math.pi) / 2
    with np.errstate(divide="ignore"):
        share = np.log1p(z * math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2)))
    far = np.where(z < -1e3, -2 * np.log(-z), share)
    z = np.maximum(standardized, -1.0)
    near = np.log(np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) + z * ndtr(z))
    return np.where(standardized < -1.0, density + far, near)
