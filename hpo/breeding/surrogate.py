"""Which candidates are worth an evaluation: two models of all losses of a run, of which one is asked each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.spatial.distance import cdist
from scipy.special import ndtri

from hpo.breeding.gaussian import GaussianProcess, Vector
from hpo.breeding.merits import bound, expected_gain
from hpo.dominance import best_first

if TYPE_CHECKING:
    from hpo.breeding.past import Past

_DARING = 0.5  # the share of suggestions that explore
# What is nearer to an individual than this share of each range is as good as known: a model that is too sure of itself
# would have the best again and again otherwise, 25 times in 34 on a network (benchmarks/README.md).
_NEAR = 0.01
_MOST_POINTS = 256  # that the models learn from: their time grows with the cube of their number
_POWERS = (-3.0, 3.0)
_LARGEST_LOG = 50.0  # of how far a loss is from the median: what is farther is as far


class Surrogate:
    """Says how much may be hoped of candidates, from what was tried on all islands and what is in flight.

    One model learns the places of losses in their order, whatever their scale, and explores: it prefers what has the
    lowest lower confidence bound, mean - 3 deviations. The other one learns losses that a power transformation has
    made as normal as can be, so that it knows how much better the best are, and prefers what is expected to improve on
    them most. The first is the better one where losses are noisy and parameters are categories, the second one where
    losses are smooth functions of numbers. Each suggestion asks one of the two, drawn at random, which is nearly as
    good as the better one in either case (benchmarks/README.md). Of several objectives, each has two models of its own.
    """

    def __init__(self, past: Past, draws: np.random.Generator) -> None:
        self._past = past
        self._draws = draws
        self._width = past.high - past.low
        self._levels = [
            np.arange(1 + width) if unordered else None
            for width, unordered in zip(self._width, past.unordered, strict=True)
        ]
        columns = [1 if levels is None else len(levels) for levels in self._levels]
        scale_of = np.repeat(np.arange(len(columns)), columns)
        self._models = [(GaussianProcess(scale_of), GaussianProcess(scale_of)) for _ in past.objectives.names]

    def learn(self) -> Callable[[Vector], Vector]:
        """Learn from all that is known now; return a function that gives the merit of each of some candidates' genes.

        Merits, shape (candidates,), compare with each other alone: the higher, the better.
        """
        past, chosen = self._past, self._training_subset()
        tried, running = self._coordinates(past.tried[chosen]), self._coordinates(past.running)
        daring = self._draws.random() < _DARING
        models = []
        for costs, (places, sizes) in zip(past.costs[chosen].T, self._models, strict=True):
            model, values = (places, normal_scores(costs)) if daring else (sizes, power_transformed(costs))
            model.fit(tried, values, known=len(past.costs))
            model.assume(running)
            models.append(model)
        merit = (bound if daring else expected_gain)(models, self._draws)
        known = np.vstack([tried, running])

        def merits_of(candidates: Vector) -> Vector:
            points = self._coordinates(candidates)
            means, deviations = zip(*(model.predict(points) for model in models), strict=True)
            merits = merit(np.array(means), np.array(deviations))
            return np.where(cdist(points, known, "chebyshev").min(axis=1) < _NEAR, -np.inf, merits)

        return merits_of

    def _training_subset(self) -> npt.NDArray[np.int64]:
        """Return the indices of the evaluations that are learned from.

        These are all, or of more than `_MOST_POINTS`, the last ones and the best of the others, half each.
        """
        costs, half = self._past.costs, _MOST_POINTS // 2
        if len(costs) <= _MOST_POINTS:
            return np.arange(len(costs))
        last = np.arange(len(costs) - half, len(costs))
        return np.union1d(best_first(costs[:-half], half)[:half], last)

    def _coordinates(self, genes: Vector) -> Vector:
        """Return coordinates from 0 to 1: one for a number, one per choice for a category; two choices are 1 apart.

        What does not exist is in the middle, whatever its gene: it tells no two individuals apart.
        """
        existing = self._past.existing(genes)
        numbers = np.where(existing, (genes - self._past.low) / np.where(self._width > 0, self._width, 1.0), 0.5)
        columns = [
            numbers[:, [gene]]
            if levels is None
            else ((genes[:, [gene]] == levels) & existing[:, [gene]]) / math.sqrt(2)
            for gene, levels in enumerate(self._levels)
        ]
        return np.hstack(columns)


def normal_scores(losses: Vector) -> Vector:
    """Return the quantile of each loss's place in the order of losses, of a normal distribution; equal ones share one.

    Losses may be infinite.
    """
    # scipy.stats, which has a function for the places, takes 0.2 s to import.
    _, places, counts = np.unique(losses, return_inverse=True, return_counts=True)
    scores: Vector = ndtri((np.cumsum(counts) - counts / 2)[places] / len(places))
    return scores


def power_transformed(losses: Vector) -> Vector:
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

    def misfit(power: float) -> float:
        """Return -log p(losses | power) but for a constant (equation 3.1)."""
        variance = np.var(_yeo_johnson(logs, power))
        return float(len(logs) / 2 * math.log(max(float(variance), 1e-300)) - (power - 1) * logs.sum())

    transformed = _yeo_johnson(logs, minimize_scalar(misfit, bounds=_POWERS, method="bounded").x)
    standardized: Vector = (transformed - transformed.mean()) / (transformed.std() or 1.0)
    return standardized


def _yeo_johnson(logs: Vector, power: float) -> Vector:
    """Transform values, whose log(1 + |value|) * sign(value) are given."""
    above = np.expm1(power * logs) / power if power else logs
    below = np.expm1((power - 2) * logs) / (power - 2) if power != 2 else logs
    return np.where(logs >= 0, above, below)
