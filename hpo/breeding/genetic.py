"""The default propagator: a genetic search whose offspring is screened by a surrogate of all evaluations of the run."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri
from threadpoolctl import ThreadpoolController

from hpo.breeding.gaussian import GaussianProcess
from hpo.breeding.past import Past, Vector
from hpo.breeding.upstream import Individual, Propagator
from hpo.space import Float, Value

_PARENTS = 10
_OFFSPRING = 100
_NEWCOMERS = 50  # drawn at random and screened along with the offspring, so that nothing is out of reach
_DEVIATIONS = 3.0
_FINEST_STEP = 1000.0  # of a float: a thousandth of its range
_MOST_POINTS = 256  # that the surrogate learns from: its time grows with the cube of their number


class Genetic(Propagator):  # type: ignore[misc]
    """Breeds many individuals, and returns the one with the lowest lower confidence bound.

    Parents are the best of the island's population. Offspring take each gene from one of two parents (uniform
    crossover), and one gene or more is mutated, each with probability 1 / genes: a category becomes any other, a number
    moves by a step whose logarithm is uniform, so that small steps are as likely as large ones at every scale
    (Muehlenbein and Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993).

    The surrogate, a Gaussian process, knows what was tried on all islands and what is in flight. It predicts the place
    of a loss in the order of losses, so that neither outliers nor failures distort it. The candidate with the lowest
    lower confidence bound, mean - d * deviation, is chosen (Srinivas et al., Gaussian process optimization in the
    bandit setting, 2010); d = 3 explores much, as suits workers that choose at the same time, each among candidates of
    its own.
    """

    def __init__(self, past: Past, rng: random.Random) -> None:
        super().__init__(-1, 1, rng)
        self._past = past
        self._limits = past.space.limits()
        self._width: Vector = past.high - past.low
        floats = np.array([isinstance(parameter, Float) for parameter in past.space.parameters.values()])
        self._grid = ~floats & ~past.unordered
        self._steps: Vector = np.where(self._grid, self._width + 1, _FINEST_STEP)
        self._mutable = np.flatnonzero(self._width > 0)
        self._draws = np.random.default_rng(rng.getrandbits(64))
        self._levels = [
            np.arange(1 + width) if unordered else None
            for width, unordered in zip(self._width, past.unordered, strict=True)
        ]
        columns = [1 if levels is None else len(levels) for levels in self._levels]
        self._model = GaussianProcess(np.repeat(np.arange(len(columns)), columns))
        self._threads = ThreadpoolController()

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        params = self._choose(population) or self._past.draw_new(self.rng) or self._past.space.draw(self.rng)
        return Individual(dict(self._past.space.encode(params)), self._limits)

    def _choose(self, population: list[Individual]) -> dict[str, Value] | None:
        """Return the best candidate that is new; None where too little is known yet, or no candidate is new."""
        parents = self._parents(population)
        if len(self._past.losses) <= len(self._width) or not len(parents):
            return None
        candidates = np.vstack([self._offspring(parents), self._newcomers()])
        # The matrices are small: if all ranks of a host used a thread per core, this would take ten times longer.
        with self._threads.limit(limits=1, user_api="blas"):
            bounds = self._lower_confidence_bounds(candidates)
        for place in np.argsort(bounds, kind="stable"):
            params = self._past.params_of(candidates[place])
            if not self._past.knows(params):
                return params
        return None

    def _parents(self, population: list[Individual]) -> Vector:
        """Return the genes of the best individuals, shape (parents, genes), each once: islands exchange copies."""
        parents: dict[tuple[float, ...], None] = {}
        for individual in sorted(population, key=lambda individual: individual.loss):
            if len(parents) == _PARENTS or not math.isfinite(individual.loss):
                break
            parents.setdefault(tuple(individual.position))
        return np.array(list(parents), float)

    def _offspring(self, parents: Vector) -> Vector:
        draws, genes = self._draws, len(self._width)
        mothers, fathers = parents[draws.integers(len(parents), size=(2, _OFFSPRING))]
        offspring = np.where(draws.random((_OFFSPRING, genes)) < 0.5, mothers, fathers)
        mutated = draws.random((_OFFSPRING, genes)) < 1 / genes
        mutated[np.arange(_OFFSPRING), draws.choice(self._mutable, _OFFSPRING)] = True
        mutants: Vector = np.where(mutated & (self._width > 0), self._mutate(offspring), offspring)
        return mutants

    def _mutate(self, genes: Vector) -> Vector:
        """Return all genes mutated; a step that would leave the range goes the other way, at most to its end."""
        draws, past = self._draws, self._past
        steps = self._steps ** draws.random(genes.shape)
        steps = np.where(self._grid, np.floor(steps), steps / _FINEST_STEP * self._width)
        signs = np.where(draws.random(genes.shape) < 0.5, -1, 1)
        there = genes + signs * steps
        back = genes - signs * steps
        moved = np.clip(np.where((there < past.low) | (there > past.high), back, there), past.low, past.high)
        shifts = 1 + np.floor(draws.random(genes.shape) * np.maximum(self._width, 1))
        mutants: Vector = np.where(past.unordered, (genes + shifts) % (self._width + 1), moved)
        return mutants

    def _newcomers(self) -> Vector:
        draws = self._draws.random((_NEWCOMERS, len(self._width)))
        whole = np.floor(draws * (self._width + 1))
        newcomers: Vector = self._past.low + np.where(self._grid | self._past.unordered, whole, draws * self._width)
        return newcomers

    def _lower_confidence_bounds(self, candidates: Vector) -> Vector:
        """Return the lower confidence bound of each candidate's place in the order of losses: the lower, the better."""
        past, chosen = self._past, self._training_subset()
        # Equal losses share their mean place. scipy.stats, which has a function for it, takes 0.2 s to import.
        _, places, counts = np.unique(past.losses[chosen], return_inverse=True, return_counts=True)
        values = ndtri((np.cumsum(counts) - counts / 2)[places] / len(places))
        self._model.fit(self._coordinates(past.tried[chosen]), values, known=len(past.losses))
        self._model.assume(self._coordinates(past.running))
        mean, deviation = self._model.predict(self._coordinates(candidates))
        bounds: Vector = mean - _DEVIATIONS * deviation
        return bounds

    def _training_subset(self) -> npt.NDArray[np.int64]:
        """Return the indices of the evaluations that the surrogate learns from.

        These are all, or of more than `_MOST_POINTS`, the last ones and the best of the others, half each.
        """
        losses, half = self._past.losses, _MOST_POINTS // 2
        if len(losses) <= _MOST_POINTS:
            return np.arange(len(losses))
        last = np.arange(len(losses) - half, len(losses))
        return np.union1d(np.argpartition(losses[:-half], half)[:half], last)

    def _coordinates(self, genes: Vector) -> Vector:
        """Return coordinates from 0 to 1: one for a number, one per choice for a category; two choices are 1 apart."""
        numbers = (genes - self._past.low) / np.where(self._width > 0, self._width, 1.0)
        columns = [
            numbers[:, [gene]] if levels is None else (genes[:, [gene]] == levels) / math.sqrt(2)
            for gene, levels in enumerate(self._levels)
        ]
        return np.hstack(columns)
