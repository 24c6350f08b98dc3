"""A Gaussian process that predicts losses.

After Rasmussen and Williams, Gaussian processes for machine learning (2006); equation numbers are the book's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky
from scipy.linalg.blas import dtrmm, strmm
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dtrtri
from scipy.optimize import minimize

Vector = npt.NDArray[np.float64]
Floats = npt.NDArray[np.floating[Any]]  # of any precision

# The fit looks for the most likely scales and noise around these; one standard deviation is a factor of e.
# A parameter matters over half of its range, and a two-hundredth of the variance does not follow from parameters.
_PRIOR_SCALE = 0.5
_PRIOR_NOISE = 0.005
_FIT_STEPS = 15  # of each fit, which continues the one before, once a tenth more evaluations are known
_GROWTH_UNTIL_FIT = 1.1
_MOST_FITTED = 128  # points at most, evenly of all: more tell the same scales, and take longer (benchmarks/README.md)
_BLOCK_SIZE = 64  # points, whose rows are added to the covariance's root at once


class GaussianProcess:
    """Predicts a function from its values at some points.

    Covariances are Matern's of order 5/2 (equation 4.17), of functions that are less smooth than those of a squared
    exponential. Before a distance is taken, each coordinate is divided by a scale; `scale_of` holds the number of the
    scale for each coordinate. `noise` is the share of the variance that is expected not to follow from coordinates.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64], noise: float = _PRIOR_NOISE) -> None:
        self._scale_indices = scale_indices
        self._scale_count = int(scale_indices.max()) + 1
        self._prior_logs: Vector = np.log(np.append(np.full(self._scale_count, _PRIOR_SCALE), noise))
        self._log_scales = self._prior_logs
        self._next_fit = 0.0
        self._points: Vector = np.empty((0, len(scale_indices)))
        self._inverse_root: Vector = np.empty(
            (0, 0)
        )  # times its transpose, it is the inverse of the points' covariance
        self._values: Vector = np.empty(0)
        self._weights: Vector = np.empty(0)
        self._learned_count = 0  # points whose values were known
        self._single_precision: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None

    def fit(self, points: Vector, values: Vector, known: int) -> None:
        """Learn from points, shape (n, coordinates), and their values, of mean 0 and variance 1.

        `known` is the number of values that are known of the function, these included: scales are fitted again when it
        has grown by a tenth.
        """
        if known >= self._next_fit:
            some = slice(None, None, 1 + (len(points) - 1) // _MOST_FITTED)
            found = minimize(
                self._compute_misfit,
                self._log_scales,
                (self._compute_half_squares(points[some]), values[some]),
                jac=True,
                method="L-BFGS-B",
                bounds=[(-4.0, 4.0)] * self._scale_count + [(-9.0, 1.0)],
                options={"maxiter": _FIT_STEPS},
            )
            self._log_scales = found.x
            self._next_fit = _GROWTH_UNTIL_FIT * known
            self._learned_count = 0
        self._learn_values(points, values)

    def assume_predictions(self, points: Vector) -> None:
        """Learn its own predictions at points whose values are not known yet, so that other points are preferred."""
        if len(points):
            mean = _compute_covariance(_compute_squares(self._scale_points(points), self._sides)) @ self._weights
            self._add_points(points)
            # What is as predicted changes no mean, only deviations.
            self._values = np.append(self._values, mean)
            self._weights = np.append(self._weights, np.zeros(len(points)))
            self._single_precision = None

    def predict(self, points: Vector, precision: type[np.floating[Any]] = np.float64) -> tuple[Vector, Vector]:
        """Return the mean and the standard deviation at each point (equations 2.25 and 2.26).

        Single precision takes half of the time. On noiseless functions of bbob, it moved deviations by a millionth in
        the median, and by 4% in one of a hundred, where they were a few thousandths.
        """
        if self._single_precision is None:
            self._single_precision = self._weights.astype(np.float32), self._inverse_root.T.astype(np.float32)
        is_single = precision is np.float32
        weights, factor = self._single_precision if is_single else (self._weights, self._inverse_root.T)
        covariance = _compute_covariance(
            _compute_squares(self._scale_points(points), self._sides).astype(precision, copy=False)
        )
        mean = covariance @ weights
        # The product of a triangle takes two thirds of the time of that of a square.
        parts = (strmm if is_single else dtrmm)(1.0, factor, covariance.T, lower=1, overwrite_b=1)
        variance = 1.0 - np.einsum("ij,ij->j", parts, parts)
        return mean.astype(float), np.sqrt(np.maximum(variance, 1e-9, dtype=float))

    @property
    def means(self) -> Vector:
        """The means at the points that it has learned, shape (points,)."""
        # Equation 2.25 at these points, where the covariance times the weights is the values less the noise's share.
        means: Vector = self._values - np.exp(self._log_scales[-1]) * self._weights
        return means

    @property
    def lowest_mean(self) -> float:
        """The lowest mean at the points that it has learned."""
        return float(np.min(self.means))

    def _learn_values(self, points: Vector, values: Vector) -> None:
        if not np.array_equal(points[: self._learned_count], self._points[: self._learned_count]):
            self._learned_count = 0
        self._points = self._points[: self._learned_count]
        self._add_points(points[self._learned_count :])
        self._learned_count, self._values = len(points), values
        self._weights = self._inverse_root @ (values @ self._inverse_root)
        self._single_precision = None

    def _add_points(self, points: Vector) -> None:
        """Learn where more points are, a block of them at a time."""
        known = len(self._points)
        self._points = np.vstack([self._points, points])
        scaled = self._scale_points(self._points)
        self._sides = _compute_sides(scaled)
        size, noise = len(self._points), float(np.exp(self._log_scales[-1]))
        root = np.zeros((size, size))
        root[:known, :known] = self._inverse_root[:known, :known]
        for start in range(known, size, _BLOCK_SIZE):
            end = min(start + _BLOCK_SIZE, size)
            covariance = _compute_covariance(_compute_squares(scaled[start:end], self._sides[:end]))
            covariance[:, start:] += noise * np.eye(end - start)
            _add_rows(root, covariance)
        self._inverse_root = root

    def _scale_points(self, points: Vector) -> Vector:
        rates: Vector = np.exp(-self._log_scales[:-1])[self._scale_indices]
        return points * rates

    def _compute_half_squares(self, points: Vector) -> Vector:
        """Return half the squared distances along the coordinates of each scale, shape (scales, points * points)."""
        squares = np.zeros((self._scale_count, len(points), len(points)))
        for coordinate, scale in zip(points.T, self._scale_indices, strict=True):
            squares[scale] += np.subtract.outer(coordinate, coordinate) ** 2 / 2
        return squares.reshape(self._scale_count, -1)

    def _compute_misfit(self, logs: Vector, squares: Vector, values: Vector) -> tuple[float, Vector]:
        """Return -log p(scales, noise | values) but for a constant, and its gradient (equations 5.8 and 5.9)."""
        rates, noise, number = np.exp(-2 * logs[:-1]), np.exp(logs[-1]), len(values)
        distances = (10 * rates @ squares).reshape(number, number)
        linear, decay = _compute_parts(distances)
        covariance = _combine_matern(distances, linear, decay)
        covariance.reshape(-1)[:: number + 1] += noise
        off = logs - self._prior_logs
        factor, is_wrong = dpotrf(covariance.T, lower=1)
        if is_wrong:
            return 1e9, np.zeros_like(logs)
        weights, _ = dpotrs(factor, values, lower=1)
        lower, _ = dpotri(factor, lower=1)  # the inverse's lower triangle, and zeros
        trace = weights @ weights - np.trace(lower)
        # The other triangle would add the same, and the diagonal, where distances are 0, nothing.
        inner = np.multiply.outer(weights, weights)
        inner -= 2 * lower.T
        inner *= linear
        inner *= decay
        gradient = np.append(-5 / 3 * rates * (squares @ inner.reshape(-1)), -0.5 * noise * trace)
        misfit = 0.5 * values @ weights + np.log(np.diag(factor)).sum() + 0.5 * off @ off
        return float(misfit), gradient + off


def _add_rows(root: Vector, covariance: Floats) -> None:
    """Write the last columns of a root, those of new points, whose covariances with all points are given.

    The root is the transposed inverse of the lower Cholesky factor, whose rows are those of the points.
    """
    start = covariance.shape[1] - len(covariance)
    known, end = root[:start, :start], covariance.shape[1]
    across = covariance[:, :start] @ known
    factor = cholesky(covariance[:, start:] - across @ across.T, lower=True, check_finite=False)
    own = dtrtri(factor, lower=1)[0].T
    root[start:end, start:end] = own
    root[:start, start:end] = known @ (across.T @ -own)


def _compute_sides(points: Vector) -> Vector:
    """Return what `_squares` multiplies by, shape (points, coordinates + 2)."""
    return np.hstack([points, np.ones((len(points), 1)), 5 * np.square(points).sum(axis=1, keepdims=True)])


def _compute_squares(some: Vector, sides: Vector) -> Vector:
    """Return 5 times the squared distances of scaled points from others, whose sides are given, shape (some, others).

    |a - b|^2 is a product, of -2a, |a|^2, 1 and b, 1, |b|^2, in a fifth of the time that distances take.
    """
    own = np.empty((len(some), sides.shape[1]))
    own[:, :-2] = -10 * some
    own[:, -2] = 5 * np.einsum("ij,ij->i", some, some)
    own[:, -1] = 1
    squares: Vector = own @ sides.T
    return np.maximum(squares, 0.0, out=squares)


def _compute_covariance(squares: Floats) -> Floats:
    return _combine_matern(squares, *_compute_parts(squares))


def _compute_parts(squares: Floats) -> tuple[Floats, Floats]:
    """Return the linear part and the decay of covariances at 5 times these squared distances."""
    linear = np.sqrt(squares)
    decay = np.exp(-linear)
    linear += 1
    return linear, decay


def _combine_matern(squares: Floats, linear: Floats, decay: Floats) -> Floats:
    """Return covariances, in the place of 5 times the squared distances: new arrays would take as long again."""
    squares *= 1 / 3
    squares += linear
    squares *= decay
    return squares
