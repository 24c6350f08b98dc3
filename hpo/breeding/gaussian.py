"""A Gaussian process that predicts losses.

After Rasmussen and Williams, Gaussian processes for machine learning (2006); equation numbers are the book's.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg import LinAlgError, cho_factor, cho_solve, cholesky
from scipy.linalg.lapack import dpotri, dtrtri
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

Vector = npt.NDArray[np.float64]

# The fit looks for the most likely scales and noise around these; one standard deviation is a factor of e.
# A parameter matters over half of its range, and a two-hundredth of the variance does not follow from parameters.
_SCALE = 0.5
_NOISE = 0.005
_STEPS = 15  # of each fit, which continues the one before, once a tenth more evaluations are known
_GROWTH = 1.1
_FITTED = 128  # points at most, evenly of all: more tell the same scales, and take longer (benchmarks/README.md)
_ROOT_5 = 5**0.5


class GaussianProcess:
    """Predicts a function from its values at some points.

    Covariances are Matern's of order 5/2 (equation 4.17), of functions that are less smooth than those of a squared
    exponential. Before a distance is taken, each coordinate is divided by a scale; `scale_of` holds the number of the
    scale for each coordinate. `noise` is the share of the variance that is expected not to follow from coordinates.
    """

    def __init__(self, scale_of: npt.NDArray[np.int64], noise: float = _NOISE) -> None:
        self._scale_of = scale_of
        self._scales = int(scale_of.max()) + 1
        self._start: Vector = np.log(np.append(np.full(self._scales, _SCALE), noise))
        self._logs = self._start
        self._next_fit = 0.0

    def fit(self, points: Vector, values: Vector, known: int) -> None:
        """Learn from points, shape (n, coordinates), and their values, of mean 0 and variance 1.

        `known` is the number of values that are known of the function, these included: scales are fitted again when it
        has grown by a tenth.
        """
        if known >= self._next_fit:
            some = slice(None, None, 1 + (len(points) - 1) // _FITTED)
            found = minimize(
                self._misfit,
                self._logs,
                (self._squares(points[some]), values[some]),
                jac=True,
                method="L-BFGS-B",
                bounds=[(-4.0, 4.0)] * self._scales + [(-9.0, 1.0)],
                options={"maxiter": _STEPS},
            )
            self._logs = found.x
            self._next_fit = _GROWTH * known
        self._learn(points, values)

    def assume(self, points: Vector) -> None:
        """Learn its own predictions at points whose values are not known yet, so that other points are preferred."""
        if len(points):
            mean, _ = self.predict(points)
            self._learn(np.vstack([self._points, points]), np.append(self._values, mean))

    def predict(self, points: Vector) -> tuple[Vector, Vector]:
        """Return the mean and the standard deviation at each point (equations 2.25 and 2.26)."""
        covariance = self._covariance(points, self._points)
        mean = covariance @ self._weights
        explained = np.square(covariance @ self._root).sum(axis=1)
        return mean, np.sqrt(np.maximum(1.0 - explained, 1e-9))

    @property
    def means(self) -> Vector:
        """The means at the points that it has learned, shape (points,)."""
        # Equation 2.25 at these points, where the covariance times the weights is the values less the noise's share.
        means: Vector = self._values - np.exp(self._logs[-1]) * self._weights
        return means

    @property
    def lowest(self) -> float:
        """The lowest mean at the points that it has learned."""
        return float(np.min(self.means))

    def _learn(self, points: Vector, values: Vector) -> None:
        self._points, self._values = points, values
        noise = np.exp(self._logs[-1])
        factor = cholesky(self._covariance(points, points) + noise * np.eye(len(points)), lower=True)
        self._root: Vector = dtrtri(factor, lower=1)[0].T  # times its transpose, it is the covariance's inverse
        self._weights = self._root @ (values @ self._root)

    def _covariance(self, some: Vector, others: Vector) -> Vector:
        rates = np.exp(-self._logs[:-1])[self._scale_of]
        return _matern(cdist(some * rates, others * rates))[0]

    def _squares(self, points: Vector) -> Vector:
        """Return half the squared distances along the coordinates of each scale, shape (points, points, scales)."""
        squares = np.zeros((len(points), len(points), self._scales))
        for coordinate, scale in zip(points.T, self._scale_of, strict=True):
            squares[:, :, scale] += np.subtract.outer(coordinate, coordinate) ** 2 / 2
        return squares

    def _misfit(self, logs: Vector, squares: Vector, values: Vector) -> tuple[float, Vector]:
        """Return -log p(scales, noise | values) but for a constant, and its gradient (equations 5.8 and 5.9)."""
        rates, noise = np.exp(-2 * logs[:-1]), np.exp(logs[-1])
        covariance, slope = _matern(np.sqrt(2 * (squares @ rates)))
        off = logs - self._start
        try:
            factor = cho_factor(covariance + noise * np.eye(len(values)), lower=True)
        except LinAlgError:
            return 1e9, np.zeros_like(logs)
        weights = cho_solve(factor, values)
        inner = np.outer(weights, weights) - _inverse(factor[0])
        slopes = (inner * slope).ravel() @ squares.reshape(-1, self._scales)
        gradient = np.append(-rates * slopes, -0.5 * noise * np.trace(inner))
        misfit = 0.5 * values @ weights + np.log(np.diag(factor[0])).sum() + 0.5 * off @ off
        return float(misfit), gradient + off


def _inverse(factor: Vector) -> Vector:
    """Return the inverse of a matrix from its lower Cholesky factor, in a third of the time that solving takes."""
    lower, _ = dpotri(factor, lower=1)
    half = np.tril(lower)
    inverse: Vector = half + half.T - np.diag(np.diag(half))
    return inverse


def _matern(distances: Vector) -> tuple[Vector, Vector]:
    """Return covariances at distances, and minus their derivatives by half the squared distance."""
    decay = np.exp(-_ROOT_5 * distances)
    linear = 1 + _ROOT_5 * distances
    return (linear + 5 / 3 * distances**2) * decay, 5 / 3 * linear * decay
