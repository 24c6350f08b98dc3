"""Predict how long evaluations take, and prefer short ones while time is scarce.

The merit of a candidate is divided by a power of its predicted duration, as the expected improvement per second is
(Snoek et al., Practical Bayesian optimization of machine learning algorithms, 2012, section 3.2). The exponent falls to
0 at the time limit (Lee et al., Cost-aware Bayesian optimization, 2020, section 4): otherwise, the search would avoid
long evaluations until the end, even if the best one is long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.breeding.gaussian_process import GaussianProcess, Vector

_NOISE = 0.05  # Prior share of noise in the variance of log durations.
_MIN_KNOWN = 5
# Durations do not matter if the standard deviation of their logarithms is at most the first number: two of three then
# differ by a factor of at most 1.5 from the mean. They matter fully from the sum of both on (benchmarks/durations.md).
_EQUAL, _RANGE = 0.4, 0.5


class DurationModel:
    """Predicts the logarithm of durations by a Gaussian process.

    Args:
        scale_indices: The index of the length scale of each coordinate, shape `(coordinates,)`.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64]) -> None:
        self._model = GaussianProcess(scale_indices, _NOISE)
        self._mean = self._deviation = self._exponent = 0.0

    def fit(self, points: Vector, seconds: Vector, scarcity: float, known: int) -> bool:
        """Learn durations, and return whether they matter.

        They do not if they hardly differ, or if fewer than 5 are known.

        Args:
            points: The points of the evaluations, shape `(evaluations, coordinates)`.
            seconds: The duration of each evaluation, shape `(evaluations,)`. Not positive or NaN if it is unknown.
            scarcity: How scarce time is, from 0 to 1.
            known: The number of all ended evaluations, which may exceed the number of points.
        """
        usable = seconds > 0
        logs = np.log(seconds[usable])
        if len(logs) < _MIN_KNOWN:
            return False
        self._mean, self._deviation = float(np.median(logs)), float(logs.std())
        self._exponent = scarcity * min(1.0, max(0.0, (self._deviation - _EQUAL) / _RANGE))
        if not self._exponent:
            return False
        self._model.fit(points[usable], (logs - self._mean) / self._deviation, known)
        return True

    def compute_log_weight(self, points: Vector, precision: type[np.floating[Any]] = np.float64) -> Vector:
        """Return the logarithm of the factor by which the duration reduces merits, shape `(points,)`.

        The factor is a power of 1 + seconds / median. So candidates that are much shorter than the median are hardly
        better than each other: most of the time is spent elsewhere.

        Args:
            points: The points of candidates, shape `(points, coordinates)`.
            precision: The floating point type of the computation.
        """
        mean, _ = self._model.predict(points, precision)
        weight: Vector = -self._exponent * np.logaddexp(0.0, self._deviation * mean)
        return weight
