"""Select evaluations, transform their losses, and predict losses by a Gaussian process.

Equation numbers refer to Rasmussen and Williams, Gaussian processes for machine learning (2006).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cholesky
from scipy.linalg.blas import dtrmm, strmm
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dtrtri
from scipy.optimize import minimize, minimize_scalar
from scipy.special import ndtri

from hpo.dominance import sort_best_first

Vector = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.floating[Any]]  # Of any precision.

# The prior of the scales and the noise is log-normal around these values; one standard deviation is
# a factor of e. The scale is half of the range of a parameter. The noise is a two-hundredth of the
# variance.
_PRIOR_SCALE = 0.5
_PRIOR_NOISE = 0.005
_FIT_STEPS = 15  # Steps of each fit, which continues the previous one.
_GROWTH_UNTIL_FIT = 1.1  # Factor by which the number of known values grows between two fits.
# A fit uses at most 128 points, evenly spaced. More give the same scales and take longer
# (benchmarks/search-quality.md).
_MOST_FITTED = 128
_MOST_EVALUATIONS = 256  # The time to learn grows with the cube of the number of evaluations.
_POWER_BOUNDS = (-3.0, 3.0)
_LARGEST_LOG = 50.0  # Limit of the logarithm of the distance of a loss from the median.
_BLOCK_SIZE = 64  # Number of points whose rows are added to the inverse root at once.


class GaussianProcess:
    """Predicts a function from its values at known points.

    The covariance function is the Matern function of order 5/2 (equation 4.17). It suits rougher
    functions than a squared exponential. Each coordinate is divided by a scale before distances are
    computed. Points have the shape `(points, coordinates)`.

    Args:
        scale_indices: The index of the scale of each coordinate, shape `(coordinates,)`.
        noise: The prior of the noise variance, relative to the variance of the function.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64], noise: float = _PRIOR_NOISE) -> None:
        self._scale_indices = scale_indices
        self._scale_count = int(scale_indices.max()) + 1
        self._prior_logs: Vector = np.log(
            np.append(np.full(self._scale_count, _PRIOR_SCALE), noise)
        )
        self._log_scales = self._prior_logs
        self._next_fit = 0.0
        self._points: Vector = np.empty((0, len(scale_indices)))
        # The product with its transpose is the inverse of the covariance of the points.
        self._inverse_root: Vector = np.empty((0, 0))
        self._values: Vector = np.empty(0)
        self._weights: Vector = np.empty(0)
        self._learned_count = 0  # Number of points with known values.
        self._single_precision: tuple[Singles, Singles] | None = None

    def fit(self, points: Vector, values: Vector, known: int) -> None:
        """Learn the values of the function at points, with mean 0 and variance 1.

        `known` is the number of all known values, of which `values` may be a selection. The scales
        and the noise are fitted again only when it has grown by a tenth since their last fit.
        """
        if known >= self._next_fit:
            chosen = slice(None, None, 1 + (len(points) - 1) // _MOST_FITTED)
            found = minimize(
                self._compute_misfit,
                self._log_scales,
                (self._compute_half_squares(points[chosen]), values[chosen]),
                jac=True,
                method="L-BFGS-B",
                bounds=[(-4.0, 4.0)] * self._scale_count + [(-9.0, 1.0)],
                options={"maxiter": _FIT_STEPS},
            )
            self._log_scales = found.x
            self._next_fit = _GROWTH_UNTIL_FIT * known
            self._learned_count = 0
        self.learn_values(points, values)

    def learn_values(self, points: Vector, values: Vector) -> None:
        """Learn values at points, without fitting the scales and the noise again."""
        if not np.array_equal(points[: self._learned_count], self._points[: self._learned_count]):
            self._learned_count = 0
        # Otherwise, only the values are new.
        if not len(self._points) == len(points) == self._learned_count:
            self._points = self._points[: self._learned_count]
            self._add_points(points[self._learned_count :])
        self._learned_count = len(points)
        self._values = values
        self._weights = self._inverse_root @ (values @ self._inverse_root)
        self._single_precision = None

    def assume_predictions(self, points: Vector) -> None:
        """Learn points with unknown values as if their values were as predicted.

        The standard deviations near these points become small, so that other points are preferred.
        """
        if len(points):
            squares = _compute_squares(self._scale_points(points), self._sides)
            mean = _compute_covariance(squares)[0] @ self._weights
            self._add_points(points)
            # Predicted values do not change the means, only the deviations.
            self._values = np.append(self._values, mean)
            self._weights = np.append(self._weights, np.zeros(len(points)))
            self._single_precision = None

    def predict(
        self, points: Vector, precision: type[np.floating[Any]] = np.float64
    ) -> tuple[Vector, Vector]:
        """Return the mean and the standard deviation at each point, both of shape `(points,)`.

        They are computed by equations 2.25 and 2.26. Single precision takes half of the time, and
        is accurate enough to screen candidates. On noiseless functions of the bbob benchmark, it
        changed deviations by a millionth in the median, and by 4% in one of a hundred cases.
        """
        if self._single_precision is None:
            self._single_precision = (
                self._weights.astype(np.float32),
                self._inverse_root.T.astype(np.float32),
            )
        weights: Floats = self._weights
        factor: Floats = self._inverse_root.T
        multiply = dtrmm
        if precision is np.float32:
            weights, factor = self._single_precision
            multiply = strmm
        squares = _compute_squares(self._scale_points(points), self._sides)
        covariance, _, _ = _compute_covariance(squares.astype(precision, copy=False))
        mean = covariance @ weights
        # A triangular product takes two thirds of the time of a full product.
        parts = multiply(1.0, factor, covariance.T, lower=1, overwrite_b=1)
        variance = 1.0 - np.einsum("ij,ij->j", parts, parts)
        return mean.astype(float), np.sqrt(np.maximum(variance, 1e-9, dtype=float))

    @property
    def means(self) -> Vector:
        """The predicted means at the learned points, shape `(points,)`."""
        # Equation 2.25. At learned points, covariance times weights equals values minus noise times
        # weights.
        means: Vector = self._values - np.exp(self._log_scales[-1]) * self._weights
        return means

    @property
    def lowest_mean(self) -> float:
        """The lowest predicted mean at the learned points."""
        return float(np.min(self.means))

    def _add_points(self, points: Vector) -> None:
        known = len(self._points)
        self._points = np.vstack([self._points, points])
        scaled = self._scale_points(self._points)
        # For `_compute_squares`.
        norms = 5 * np.square(scaled).sum(axis=1, keepdims=True)
        self._sides = np.hstack([scaled, np.ones((len(scaled), 1)), norms])
        size = len(self._points)
        noise = float(np.exp(self._log_scales[-1]))
        root = np.zeros((size, size))
        root[:known, :known] = self._inverse_root[:known, :known]
        for start in range(known, size, _BLOCK_SIZE):
            end = min(start + _BLOCK_SIZE, size)
            squares = _compute_squares(scaled[start:end], self._sides[:end])
            covariance, _, _ = _compute_covariance(squares)
            covariance[:, start:] += noise * np.eye(end - start)
            _add_rows(root, covariance)
        self._inverse_root = root

    def _scale_points(self, points: Vector) -> Vector:
        rates: Vector = np.exp(-self._log_scales[:-1])[self._scale_indices]
        return points * rates

    def _compute_half_squares(self, points: Vector) -> Vector:
        """Return half of the squared distances between points, shape `(scales, points * points)`.

        For each scale, only the coordinates with this scale are used.
        """
        squares = np.zeros((self._scale_count, len(points), len(points)))
        for coordinate, scale in zip(points.T, self._scale_indices, strict=True):
            squares[scale] += np.subtract.outer(coordinate, coordinate) ** 2 / 2
        return squares.reshape(self._scale_count, -1)

    def _compute_misfit(
        self, logs: Vector, squares: Vector, values: Vector
    ) -> tuple[float, Vector]:
        """Return -log p(scales, noise | values) up to a constant, and its gradient.

        Both are computed by equations 5.8 and 5.9. The logarithms of the scales are followed by the
        logarithm of the noise variance. The squares are those of `_compute_half_squares`.
        """
        rates = np.exp(-2 * logs[:-1])
        noise = np.exp(logs[-1])
        number = len(values)
        distances = (10 * rates @ squares).reshape(number, number)
        covariance, linear, decay = _compute_covariance(distances)
        covariance.reshape(-1)[:: number + 1] += noise
        off = logs - self._prior_logs
        factor, is_wrong = dpotrf(covariance.T, lower=1)
        if is_wrong:
            return 1e9, np.zeros_like(logs)
        weights, _ = dpotrs(factor, values, lower=1)
        lower, _ = dpotri(factor, lower=1)  # The lower triangle of the inverse, and zeros.
        trace = weights @ weights - np.trace(lower)
        # The lower triangle is doubled, because the upper one would add the same. The diagonal has
        # distance 0.
        inner = np.multiply.outer(weights, weights)
        inner -= 2 * lower.T
        inner *= linear
        inner *= decay
        gradient = np.append(-5 / 3 * rates * (squares @ inner.reshape(-1)), -0.5 * noise * trace)
        misfit = 0.5 * values @ weights + np.log(np.diag(factor)).sum() + 0.5 * off @ off
        return float(misfit), gradient + off


def _add_rows(root: Vector, covariance: Floats) -> None:
    """Add new points to an inverse root, in place, which has zeros for further points.

    The inverse root is the transposed inverse of the lower Cholesky factor of the covariance
    matrix. The covariances are those of the new points with all earlier and new points, shape
    `(new, earlier + new)`.
    """
    end = covariance.shape[1]
    start = end - len(covariance)
    known = root[:start, :start]
    across = covariance[:, :start] @ known
    factor = cholesky(covariance[:, start:] - across @ across.T, lower=True, check_finite=False)
    own = dtrtri(factor, lower=1)[0].T
    root[start:end, start:end] = own
    root[:start, start:end] = known @ (across.T @ -own)


def _compute_squares(scaled: Vector, sides: Vector) -> Vector:
    """Return 5 times the squared distances, which are the r^2 of the Matern covariance.

    |a - b|^2 is the product of (-2a, |a|^2, 1) and (b, 1, |b|^2), which is `sides`. The product
    takes a fifth of the time of differences.
    """
    own = np.empty((len(scaled), sides.shape[1]))
    own[:, :-2] = -10 * scaled
    own[:, -2] = 5 * np.einsum("ij,ij->i", scaled, scaled)
    own[:, -1] = 1
    squares: Vector = own @ sides.T
    return np.maximum(squares, 0.0, out=squares)


def _compute_covariance(squares: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the Matern covariances (1 + r + r^2 / 3) * exp(-r), where r^2 is `squares`.

    Their parts 1 + r and exp(-r) follow. The covariances overwrite `squares`, because new arrays
    would double the time.
    """
    linear = np.sqrt(squares)
    decay = np.exp(-linear)
    linear += 1
    squares *= 1 / 3
    squares += linear
    squares *= decay
    return squares, linear, decay


def select_learned(costs: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of the evaluations that a model learns from.

    These are all evaluations if there are at most 256. Otherwise, they are the latest 128, and the
    best 128 of the earlier evaluations. The costs have the shape `(evaluations, objectives)`.
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
