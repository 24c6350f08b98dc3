"""The default propagator: a genetic search whose offspring is screened by a surrogate of all evaluations of the run."""

from __future__ import annotations

import math
import random

import numpy as np
from threadpoolctl import ThreadpoolController

from hpo.breeding.past import Past, Vector
from hpo.breeding.surrogate import Surrogate
from hpo.breeding.upstream import Individual, Propagator
from hpo.space import Float, Value

_PARENTS = 10
_OFFSPRING = 100
_NEWCOMERS = 50  # drawn at random and screened along with the offspring, so that nothing is out of reach
_GENERATIONS = 10  # for which the most promising are bred on, on the surrogate
_PROMISING = 20
_FINEST_STEP = 1000.0  # of a float: a thousandth of its range


class Genetic(Propagator):  # type: ignore[misc]
    """Breeds many individuals, and returns the one of which a surrogate hopes most.

    Parents are the best of the island's population. Offspring take each gene from one of two parents (uniform
    crossover), and one gene or more is mutated, each with probability 1 / genes: a category becomes any other, a number
    moves by a step whose logarithm is uniform, so that small steps are as likely as large ones at every scale
    (Muehlenbein and Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993).

    The most promising candidates are bred on for some generations, on the surrogate alone. Each worker has candidates
    and a surrogate of its own; all surrogates know all islands.
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
        self._surrogate = Surrogate(past, self._draws)
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
        # The matrices are small: if all ranks of a host used a thread per core, this would take ten times longer.
        with self._threads.limit(limits=1, user_api="blas"):
            candidates = self._bred_on(np.vstack([self._offspring(parents), self._newcomers()]))
        for genes in candidates:
            params = self._past.params_of(genes)
            if not self._past.knows(params):
                return params
        return None

    def _bred_on(self, candidates: Vector) -> Vector:
        """Return candidates, and what some generations bred of the most promising of them, the best first."""
        merits_of = self._surrogate.learn()
        merits = merits_of(candidates)
        for _ in range(_GENERATIONS):
            promising = candidates[np.argsort(-merits, kind="stable")[:_PROMISING]]
            offspring = self._offspring(promising)
            candidates = np.vstack([candidates, offspring])
            merits = np.append(merits, merits_of(offspring))
        best_first: Vector = candidates[np.argsort(-merits, kind="stable")]
        return best_first

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
