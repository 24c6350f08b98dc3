"""Functional ANOVA: a model of losses as a sum of effects. The variances of the effects are parameter importances.

A function of independent parameters is the sum of a constant, an effect of each parameter, an
effect of each pair, and so on. Each effect has the mean 0 along each of its parameters (Sobol
1993). The model has the effects of one and of two parameters. They are Gaussian processes (Lu et
al. 2022, Additive Gaussian processes revisited). The variance of an effect is 0 with some
probability (spike and slab, George and McCulloch 1993). So each draw from the posterior shows which
parameters matter, and how much.

A point is the position of one evaluation in the search space. The coupling is the variance of the
effect of a pair, relative to the product of the variances of both parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg.lapack import dpotrf, dpotrs

from hpo.breeding.gaussian_process import Vector

_WAVES = 6  # Number of cosines in the effect of a number.
_DECAY = 3.0  # The variances of the weights of the cosines are proportional to 1, 2^-3, 3^-3, ...
# Variance of the constant. The mean of a sample differs from the mean of the space.
_CONSTANT = 10.0
# The grid of each variance, in units of the variance of the sample. All values except 0 are equally
# likely.
_VARIANCES = np.array([0.0, 0.05, 0.25, 1.25, 6.25])  # Variances of an effect of one parameter.
_COUPLINGS = np.array(
    [0.0, 0.05, 0.25, 1.0]
)  # Variances of a pair's effect, in units of the product of both variances.
_NOISES = np.array([0.0005, 0.002, 0.008, 0.03, 0.1, 0.3, 1.0])
_MOST_VISITED = 40  # Number of parameters with the variance 0 that one sweep draws again.
_LARGE_VALUE = 1e12  # Exceeds the squares of the values in units of the noise.


@dataclass(frozen=True)
class Effect:
    """The effect of one parameter: a sum of functions that are orthonormal over its range, with random weights."""

    functions: Vector
    """The values of the functions at the points of a sample, shape `(points, functions)`."""
    variances: Vector
    """The variances of the weights, shape `(functions,)`. Their sum is 1."""

    @classmethod
    def from_number(cls, positions: Vector, values: float) -> Effect:
        """Return the effect of a numerical parameter.

        Args:
            positions: The positions of the points in the range of the parameter, from 0 to 1, shape
                `(points,)`.
            values: The number of values that the parameter can have, which may be infinite.
        """
        orders = np.arange(1, 1 + int(min(_WAVES, values - 1)))
        return cls(_compute_waves(positions, orders), orders**-_DECAY / np.sum(orders**-_DECAY))

    @classmethod
    def from_category(cls, choices: Vector, values: int) -> Effect:
        """Return the effect of a categorical parameter, whose choices all have the same distance from each other.

        Args:
            choices: The index of the choice at each point, shape `(points,)`.
            values: The number of choices.
        """
        orders = np.arange(1, values)
        return cls(
            _compute_waves((choices + 0.5) / values, orders),
            np.full(len(orders), 1 / max(1, len(orders))),
        )


def _compute_waves(positions: Vector, orders: npt.NDArray[np.int64]) -> Vector:
    waves: Vector = math.sqrt(2) * np.cos(np.pi * np.multiply.outer(positions, orders))
    return waves


class AnovaSampler:
    """Draw functions from the posterior by Gibbs sampling, and compute the variances of their effects.

    Args:
        effects: The effect of each parameter. Its functions are 0 at points where the parameter is
            inactive.
        overlap: The share of the search space in which two parameters have a common effect, 0 if
            they have none. On the diagonal, the share in which one parameter is active. Shape
            `(parameters, parameters)`.
        values: The values of the function at the points in one or more transformations, shape
            `(transformations, points)`. Each transformation has the mean 0 and the variance 1.
        log_odds: The logarithm of the prior probability of each transformation, shape
            `(transformations,)`.
        rng: The random number generator.
    """

    def __init__(
        self,
        effects: Sequence[Effect],
        overlap: Vector,
        values: Vector,
        log_odds: Vector,
        rng: np.random.Generator,
    ) -> None:
        self._deviations = [np.sqrt(own.variances) for own in effects]
        self._features = [own.functions * np.sqrt(own.variances) for own in effects]
        self._kernels = np.array([features @ features.T for features in self._features])
        self._overlap, self._rng = overlap, rng
        self._all_values, self._log_odds = values, log_odds
        self._count, self._points = len(effects), values.shape[1]
        self._values = values[0]
        self._variances: Vector = np.where(
            rng.random(self._count) < 3 / self._count, _VARIANCES[2], 0.0
        )
        self._coupling, self._noise = float(_COUPLINGS[1]), float(_NOISES[4])

    def sample(self, burn_in: int, draws: int) -> Vector:
        """Return the variance that each parameter causes in each draw, shape `(draws, parameters)`.

        Args:
            burn_in: The number of sweeps to discard at the start. A sweep draws the variances once.
            draws: The number of draws to return.
        """
        found = []
        for sweep in range(burn_in + draws):
            # Early effects are wrong. They would select a wrong transformation, which the sampler
            # then never leaves.
            self._sweep(is_settled=sweep >= burn_in - 4)
            if sweep >= burn_in:
                found.append(self._draw_variances())
        return np.array(found)

    def _sweep(self, is_settled: bool) -> None:
        """Draw the variances, the coupling and the noise in turn, by a griddy Gibbs sampler (Ritter and Tanner 1992).

        If `is_settled`, also draw the transformation of the values.
        """
        self._single, self._double = self._compute_covariances()
        self._score = self._compute_score(self._single + self._coupling * self._double, self._noise)
        idle = self._rng.permutation(np.flatnonzero(self._variances == 0))[:_MOST_VISITED]
        for index in self._rng.permutation(np.append(np.flatnonzero(self._variances), idle)):
            self._draw_effect(int(index))
        single, double = self._single, self._double
        self._coupling = float(
            _COUPLINGS[
                self._draw_index(
                    [self._compute_score(single + c * double, self._noise) for c in _COUPLINGS]
                )
            ]
        )
        covariance = single + self._coupling * double
        self._noise = float(
            _NOISES[self._draw_index([self._compute_score(covariance, noise) for noise in _NOISES])]
        )
        if is_settled:
            self._draw_transformation(covariance)

    def _draw_effect(self, index: int) -> None:
        before, kernel = self._variances[index], self._kernels[index]
        others = np.flatnonzero((self._variances > 0) & (self._overlap[index] > 0))
        others = others[others != index]
        partners = kernel * np.tensordot(self._variances[others], self._kernels[others], 1)
        own = kernel + self._coupling * partners
        rest = self._single + self._coupling * self._double - before * own
        scores = [
            self._score
            if variance == before
            else self._compute_score(rest + variance * own, self._noise)
            for variance in _VARIANCES
        ]
        # The share of the parameters that matter is unknown. Given the other parameters, it has a
        # beta distribution.
        matter = (1 + np.count_nonzero(self._variances) - (before > 0)) / (1 + self._count)
        priors = np.append(1 - matter, np.full(len(_VARIANCES) - 1, matter / (len(_VARIANCES) - 1)))
        chosen = self._draw_index(scores + np.log(priors))
        self._score, self._variances[index] = scores[chosen], _VARIANCES[chosen]
        if change := _VARIANCES[chosen] - before:
            self._single += change * kernel
            self._double += change * partners

    def _draw_transformation(self, covariance: Vector) -> None:
        factor, is_wrong = self._factorize(covariance, self._noise)
        if not is_wrong:
            weights, _ = dpotrs(factor[:-1, :-1], self._all_values.T, lower=1)
            scores = self._log_odds - 0.5 * np.einsum("ij,ji->i", self._all_values, weights)
            self._values = self._all_values[self._draw_index(scores)]

    def _compute_covariances(self) -> tuple[Vector, Vector]:
        """Return the covariances of the effects of one parameter, and of pairs. The coupling must scale the latter."""
        single, double = (
            np.full((self._points, self._points), _CONSTANT),
            np.zeros((self._points, self._points)),
        )
        for index in np.flatnonzero(self._variances):
            single += self._variances[index] * self._kernels[index]
        for first, second in self._find_pairs():
            double += (
                self._variances[first]
                * self._variances[second]
                * self._kernels[first]
                * self._kernels[second]
            )
        return single, double

    def _find_pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of parameters that have variances above 0 and may have a common effect."""
        matter = np.flatnonzero(self._variances)
        return [
            (int(i), int(j)) for i in matter for j in matter if i < j and self._overlap[i, j] > 0
        ]

    def _compute_score(self, covariance: Vector, noise: float) -> float:
        """Return log p(values | covariance, noise) up to a constant."""
        factor, is_wrong = self._factorize(covariance, noise)
        if is_wrong:
            return -math.inf
        solution = factor[-1, :-1]
        return float(-0.5 * solution @ solution - np.log(np.diagonal(factor)[:-1]).sum())

    def _factorize(self, covariance: Vector, noise: float) -> tuple[Vector, bool]:
        """Return a lower Cholesky factor, and whether the factorization failed.

        The factored matrix is the covariance plus the noise, with the values appended as its final
        row. Let L be the factor without this row. The final row of the factor is then the solution
        x of L x = values.
        """
        whole = np.empty((self._points + 1, self._points + 1), order="F")
        whole[:-1, :-1], whole[-1, :-1] = covariance, self._values
        whole.reshape(-1, order="F")[:: self._points + 2] += noise
        whole[-1, -1] = _LARGE_VALUE
        factor, problem = dpotrf(whole, lower=1, clean=0, overwrite_a=1)
        return factor, problem != 0

    def _draw_index(self, scores: Sequence[float] | Vector) -> int:
        chances = np.cumsum(np.exp(np.array(scores) - np.max(scores)))
        return int(np.searchsorted(chances, self._rng.random() * chances[-1]))

    def _draw_variances(self) -> Vector:
        """Draw a function, and return the variance over the search space that each parameter causes.

        Each parameter of a pair causes half of the variance of the pair's effect: Shapley effects
        (Owen 2014). The function is drawn from the prior and corrected at the points (Wilson et al.
        2020).
        """
        blocks = self._make_blocks()
        weights = [self._rng.standard_normal(block.shape[1]) for _, _, block in blocks]
        drawn: Vector = math.sqrt(self._noise) * self._rng.standard_normal(size=(self._points,))
        drawn += math.sqrt(_CONSTANT) * float(self._rng.standard_normal())
        for (_, _, block), own in zip(blocks, weights, strict=True):
            drawn += block @ own
        single, double = self._compute_covariances()
        covariance = single + self._coupling * double + self._noise * np.eye(self._points)
        off = np.linalg.solve(covariance, self._values - drawn)
        found = np.zeros(self._count)
        for (pair, deviations, block), own in zip(blocks, weights, strict=True):
            variance = self._overlap[pair] * np.sum(np.square(deviations * (own + block.T @ off)))
            for index in pair:
                found[index] += variance / 2
        return found

    def _make_blocks(self) -> list[tuple[tuple[int, int], Vector, Vector]]:
        """Return for each effect its parameters, the standard deviations of its weights, and its scaled functions."""
        blocks: list[tuple[tuple[int, int], Vector, Vector]] = []
        for index in np.flatnonzero(self._variances).tolist():
            scale = math.sqrt(self._variances[index])
            blocks.append(
                ((index, index), scale * self._deviations[index], scale * self._features[index])
            )
        for first, second in self._find_pairs() if self._coupling else []:
            scale = math.sqrt(self._coupling * self._variances[first] * self._variances[second])
            deviations = np.outer(self._deviations[first], self._deviations[second]).ravel()
            product = self._features[first][:, :, None] * self._features[second][:, None, :]
            blocks.append(
                ((first, second), scale * deviations, scale * product.reshape(self._points, -1))
            )
        return blocks
