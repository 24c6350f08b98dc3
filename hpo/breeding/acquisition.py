"""What may be hoped of candidates, from what models predict of each objective: the higher, the better.

Means and deviations are of shape (objectives, candidates), and merits of shape (candidates,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import erfcx, ndtr

from hpo.breeding.gaussian_process import GaussianProcess, Vector
from hpo.dominance import find_non_dominated

_BOUND_DEVIATIONS = 3.0  # of the lower confidence bound
_RAYS = 64
_MARGIN = 0.1  # of the front's extent, by which its ends are better than the reference
_SMOOTHING = 0.01  # what counts as some gain, so that of two candidates without any the nearer one is better
_FAR = -30.0

Acquisition = Callable[[Vector, Vector], Vector]


def lower_confidence_bound(
    models: Sequence[GaussianProcess], draws: np.random.Generator, _: float | None = None
) -> Acquisition:
    """Return what prefers the lowest lower confidence bound, or of several objectives, the one that adds most.

    Srinivas et al., Gaussian process optimization in the bandit setting (2010).
    """
    if len(models) == 1:
        return lambda mean, deviation: _BOUND_DEVIATIONS * deviation[0] - mean[0]
    gain = HypervolumeImprovement(np.array([model.means for model in models]), draws)
    return lambda mean, deviation: gain((mean - _BOUND_DEVIATIONS * deviation)[None])


def expected_improvement(
    models: Sequence[GaussianProcess], draws: np.random.Generator, lowest: float | None = None
) -> Acquisition:
    """Return what prefers most expected improvement, of the lowest mean, or of several objectives, of hypervolume.

    `lowest` replaces the lowest mean at the points that the model has learned.

    Jones et al., Efficient global optimization of expensive black-box functions (1998), equation 15. Of several
    objectives, it is the mean over values that are drawn.
    """
    if len(models) == 1:
        best = models[0].lowest_mean if lowest is None else lowest
        return lambda mean, deviation: np.log(deviation[0]) + log_expected_improvement((best - mean[0]) / deviation[0])
    gain = HypervolumeImprovement(np.array([model.means for model in models]), draws)
    drawn = draws.standard_normal((_RAYS, len(models), 1))
    return lambda mean, deviation: gain(mean + deviation * drawn)


class HypervolumeImprovement:
    """The hypervolume that candidates may add to the front of known means, shape (objectives, individuals).

    The hypervolume is the mean, over rays from the reference in all directions, of the power of how far along each the
    front reaches (Golovin and Zhang, Random hypervolume scalarizations for provable multi-objective black box
    optimization, 2020, lemma 5). So it takes any number of objectives.
    """

    def __init__(self, known: Vector, draws: np.random.Generator) -> None:
        self._reference = compute_reference_point(known)[:, None]
        span = self._reference - known.min(axis=1, keepdims=True)
        rays = np.abs(draws.standard_normal((_RAYS, len(known), 1)))
        rays /= np.linalg.norm(rays, axis=1, keepdims=True)
        self._steps = rays * np.where(span > 0, span, 1.0)
        self._front_reach = self._measure_reach(known[None]).max(axis=1, keepdims=True)

    def __call__(self, costs: Vector) -> Vector:
        """Return the logarithm of what is gained, of costs for each ray, shape (rays or 1, objectives, candidates)."""
        ahead = (self._measure_reach(costs) - self._front_reach) / _SMOOTHING
        # log(log(1 + exp(ahead))), which is ahead where that is far below zero.
        logs = np.where(ahead < _FAR, ahead, np.log(np.logaddexp(0.0, np.maximum(ahead, _FAR))))
        gained: Vector = np.logaddexp.reduce(logs, axis=0)
        return gained

    def _measure_reach(self, costs: Vector) -> Vector:
        """Return how far candidates reach along rays, to the power of the objectives, shape (rays, candidates)."""
        far = ((self._reference - costs) / self._steps).min(axis=1)
        reached: Vector = np.copysign(np.abs(far) ** len(self._reference), far)
        return reached


def compute_reference_point(known: Vector) -> Vector:
    """Return what is a little worse than the front of known means in each objective, and as bad as their median."""
    front = known[:, find_non_dominated(known.T)]
    ideal, worst = front.min(axis=1), front.max(axis=1)
    reference: Vector = np.maximum(worst + _MARGIN * (worst - ideal), np.median(known, axis=1))
    return reference


def log_expected_improvement(standardized: Vector) -> Vector:
    """Return log(density(z) + z * distribution(z)) of the normal distribution, also where it is far below zero.

    Ament et al., Unexpected improvements to expected improvement for Bayesian optimization (2023), equation 9.
    """
    z = np.minimum(standardized, -1.0)
    density = -(z**2) / 2 - math.log(2 * math.pi) / 2
    with np.errstate(divide="ignore"):
        share = np.log1p(z * math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2)))
    far = np.where(z < -1e3, -2 * np.log(-z), share)
    z = np.maximum(standardized, -1.0)
    near = np.log(np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) + z * ndtr(z))
    return np.where(standardized < -1.0, density + far, near)
