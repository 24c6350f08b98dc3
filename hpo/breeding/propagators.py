"""Make propagators (objects that breed individuals) by their names.

They work without MPI, so that tests and benchmarks can simulate islands.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

import numpy as np

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.genetic import GeneticPropagator
from hpo.breeding.propulate_compat import (
    ActiveCMA,
    CMAPropagator,
    Individual,
    ParallelNelderMead,
    Propagator,
    StatelessPSO,
    get_default_propagator,
)

_MOST_TRIES = 10  # A converged propagator may breed only known individuals.


class RandomSearch(Propagator):  # type: ignore[misc]
    """Draws individuals at random from the whole search space.

    Args:
        rng: The random number generator.
    """

    def __init__(self, history: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(0, 1, rng)
        self._history = history

    def __call__(self, _: list[Individual]) -> Individual:
        """Return a random individual that is new to the run. If none is left, return any random individual."""
        space = self._history.space
        return Individual(
            dict(space.encode(self._history.draw_new(self.rng) or space.draw(self.rng))), space.list_gene_limits()
        )


class CopyOffspring(Propagator):  # type: ignore[misc]
    """Copies the offspring of another propagator, so that it is never the same object as a parent.

    If no step of a composed propagator applies, Propulate returns the parent object itself. Without a copy, this parent
    would be changed and would be in the population twice.
    """

    def __init__(self, propagator: Propagator) -> None:
        super().__init__(propagator.parents, propagator.offspring, propagator.rng)
        self._propagator = propagator

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual. Its loss is infinite until it is evaluated."""
        individual = copy.deepcopy(self._propagator(population))
        individual.loss = math.inf
        return individual


class Deduplicate(Propagator):  # type: ignore[misc]
    """Repeats another propagator until its offspring is new to the run and satisfies the constraints.

    After 10 tries, an individual is drawn at random.

    Args:
        rng: The random number generator.
    """

    def __init__(self, propagator: Propagator, history: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(propagator.parents, propagator.offspring, rng)
        self._propagator = propagator
        self._history = history
        self._random_search = RandomSearch(history, rng)

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual that is new to the run. If none is left, return any random individual.

        Individuals of the population that are not active, because they were replaced, cannot be parents.
        """
        self._history.update()
        population = [individual for individual in population if individual.active]
        for _ in range(_MOST_TRIES):
            individual = self._propagator(population)
            params = self._history.space.decode(individual)
            if not self._history.is_known(params) and self._history.space.allows(params):
                return individual
        return self._random_search(population)


class UnitCubeAdapter(Propagator):  # type: ignore[misc]
    """Breeds with a propagator that supports only floats, by converting each parameter to a float from 0 to 1.

    Args:
        make_on_cube: A function that takes a dict with the limits (0.0, 1.0) of each parameter, and returns the
            propagator.
    """

    def __init__(
        self, history: EvaluationHistory, make_on_cube: Callable[[dict[str, tuple[float, float]]], Propagator]
    ) -> None:
        self._history = history
        self._limits = history.space.list_gene_limits()
        self._cube = dict.fromkeys(self._limits, (0.0, 1.0))
        self._propagator = make_on_cube(self._cube)
        super().__init__(self._propagator.parents, self._propagator.offspring, self._propagator.rng)
        self._low, self._width = history.low, np.where(history.high > history.low, history.high - history.low, 1.0)
        self._random_search = RandomSearch(history, self._propagator.rng)
        self._scaled: dict[
            int, tuple[Individual, Individual]
        ] = {}  # By id. The original is stored, too, so that its id stays unique.

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual from the population of the island."""
        if not population:
            return self._random_search(population)  # A particle swarm needs a first individual.
        # Islands exchange copies. With them, Propulate's CMA-ES would have too few different individuals.
        different = {individual.position.tobytes(): individual for individual in population}
        bred = self._propagator([self._scale_individual(individual) for individual in different.values()])
        genes = self._low + np.clip(bred.position, 0.0, 1.0) * self._width
        return Individual(
            self._history.space.round_genes(dict(zip(self._limits, genes.tolist(), strict=True))), self._limits
        )

    def _scale_individual(self, individual: Individual) -> Individual:
        if id(individual) not in self._scaled:
            scaled = Individual((individual.position - self._low) / self._width, self._cube)
            for name in ("loss", "generation", "rank", "island"):
                setattr(scaled, name, getattr(individual, name))
            self._scaled[id(individual)] = (individual, scaled)
        return self._scaled[id(individual)][1]


def _make_tpe(history: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    from hpo.breeding.tpe import TPEPropagator

    return TPEPropagator(history, rng)


def _make_cmaes(history: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    return UnitCubeAdapter(history, lambda cube: CMAPropagator(ActiveCMA(), cube, rng=rng))


def _make_pso(history: EvaluationHistory, rng: random.Random, _: int, index: int) -> Propagator:
    # Clerc and Kennedy (2002) derived both factors. Propulate's examples use the same.
    return UnitCubeAdapter(history, lambda cube: StatelessPSO(1.49445, 1.49445, index, cube, rng))


def _make_nelder_mead(history: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    start = np.array([rng.random() for _ in history.low])
    return UnitCubeAdapter(history, lambda cube: ParallelNelderMead(cube, rng, start, scale=0.25))


def _make_propulate(history: EvaluationHistory, rng: random.Random, workers: int, _: int) -> Propagator:
    # The breeding population is twice the number of workers of the island.
    return CopyOffspring(get_default_propagator(max(4, 2 * workers), history.space.list_gene_limits(), rng=rng))


_MAKERS: dict[str, Callable[[EvaluationHistory, random.Random, int, int], Propagator]] = {
    "ga": lambda history, rng, *_: GeneticPropagator(history, rng),
    "tpe": _make_tpe,
    "cmaes": _make_cmaes,
    "pso": _make_pso,
    "nelder-mead": _make_nelder_mead,
    "propulate": _make_propulate,
    "random": lambda history, rng, *_: RandomSearch(history, rng),
}


def make_propagator(name: str, history: EvaluationHistory, rng: random.Random, workers: int, index: int) -> Propagator:
    """Return a propagator for one worker.

    Args:
        name: A name in `hpo.options.PROPAGATORS`.
        rng: The random number generator.
        workers: The number of workers of the island.
        index: The index of the worker on its island.
    """
    return _MAKERS[name](history, rng, workers, index)
