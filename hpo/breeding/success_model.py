"""Predict the probability that an evaluation succeeds, from the evaluations that succeeded and failed.

Evaluations fail where networks need too much memory, where losses become infinite, or where a combination of
hyperparameters is invalid. A failure has no loss. Therefore, the models of the losses do not learn from failures.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtri

from hpo.breeding.gaussian_process import GaussianProcess, Vector

Mask = npt.NDArray[np.bool_]

_MOST_EVALUATIONS = 256  # The latest ones. The time to learn grows with the cube of their number.
_STEP = 64  # The oldest evaluations are left out in blocks, because the model must then learn from the beginning.
_AMPLITUDE = 10.0  # Standard deviation of the latent function: most regions surely succeed, or surely fail.
_ITERATIONS = 4  # Of each fit, which continues the previous one.
_LONGEST_STREAK = 8  # A longer streak of failures has probability 3e-6 if every fifth evaluation fails.
# A suggestion that fails costs more than a suggestion without a gain. Twice this exponent lowers the merit far from all
# evaluations so much that a search stays near its first successes if most evaluations fail (benchmarks/failures.md).
_CAUTION = 4.0


class SuccessModel:
    """Predicts the probability of success by a Gaussian process classifier with the probit link function.

    A latent function of the hyperparameters is modelled by a Gaussian process. The probability of success is the
    standard normal distribution function of the latent value. The posterior is approximated by variational inference
    (Girolami and Rogers, Variational Bayesian multinomial probit regression with Gaussian process priors, 2006,
    equation 8): targets are the means of truncated normal distributions, and they and the latent values are updated in
    turn.

    Args:
        scale_indices: The index of the length scale of each coordinate, shape `(coordinates,)`.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64]) -> None:
        self._model = GaussianProcess(scale_indices, noise=_AMPLITUDE**-2)
        self._offset = 0.0
        self._latent: Vector = np.empty(0)

    def fit(self, points: Vector, succeeded: Mask, known: int) -> None:
        """Learn which evaluations succeeded.

        Args:
            points: The points of the evaluations, shape `(evaluations, coordinates)`.
            succeeded: Whether each evaluation succeeded, shape `(evaluations,)`.
            known: The number of all ended evaluations, which may exceed the number of points.
        """
        # The latent value far from all evaluations. It corresponds to the share of successes.
        self._offset = float(ndtri((succeeded.sum() + 1) / (len(succeeded) + 2)))
        signs = np.where(succeeded, 1.0, -1.0)
        # The latent values of the previous fit are close to the new ones, unless the oldest evaluations were left out.
        known_latent = self._latent if len(self._latent) <= len(points) else np.empty(0)
        latent = np.append(known_latent, np.full(len(points) - len(known_latent), self._offset))
        for iteration in range(_ITERATIONS):
            log_density = -(latent**2) / 2 - math.log(2 * math.pi) / 2
            targets = latent + signs * np.exp(log_density - log_ndtr(signs * latent))
            values = (targets - self._offset) / _AMPLITUDE
            # Only one iteration may fit the scales, when the targets are already close to their final values.
            if iteration == _ITERATIONS // 2:
                self._model.fit(points, values, known)
            else:
                self._model.learn_values(points, values)
            latent = self._offset + _AMPLITUDE * self._model.means
        self._latent = latent

    def compute_log_weight(self, points: Vector, precision: type[np.floating[Any]] = np.float64) -> Vector:
        """Return the logarithm of the factor by which the chance to fail reduces merits, shape `(points,)`.

        The factor is the fourth power of the probability of success.

        Args:
            points: The points of candidates, shape `(points, coordinates)`.
            precision: The floating point type of the computation.
        """
        mean, deviation = self._model.predict(points, precision)
        latent, deviation = self._offset + _AMPLITUDE * mean, _AMPLITUDE * deviation
        weight: Vector = _CAUTION * log_ndtr(latent / np.sqrt(1 + deviation**2))
        return weight


def find_informative(succeeded: Mask) -> npt.NDArray[np.int64]:
    """Return the indices of all evaluations whose success or failure may depend on their hyperparameters.

    A streak of more than 8 failures is left out: a mistake in the code or a broken machine fails all evaluations,
    whatever their hyperparameters.

    Args:
        succeeded: Whether each evaluation succeeded, in the order of their end, shape `(evaluations,)`.
    """
    streaks = np.cumsum(succeeded)  # All failures of a streak have the same number.
    lengths = np.bincount(streaks[~succeeded], minlength=len(succeeded) + 1)
    return np.flatnonzero(succeeded | (lengths[streaks] <= _LONGEST_STREAK))


def select_latest(evaluations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the latest of the informative evaluations, at most 256, from which the model learns."""
    surplus = max(0, len(evaluations) - _MOST_EVALUATIONS)
    return evaluations[-(-surplus // _STEP) * _STEP :]
