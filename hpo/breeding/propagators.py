"""The propagators by their names: how individuals are bred, on real islands and on simulated ones alike."""

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

_MOST_TRIES = 10  # of a propagator, whose offspring may all be known: it may have converged


class RandomSearch(Propagator):  # type: ignore[misc]
    """Random search: individuals drawn from the whole space."""

    def __init__(self, past: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(0, 1, rng)
        self._history = past

    def __call__(self, _: list[Individual]) -> Individual:
        """Draw one individual that is new to the run, if there is one."""
        space = self._history.space
        return Individual(
            dict(space.encode(self._history.draw_new(self.rng) or space.draw(self.rng))), space.list_gene_limits()
        )


class CopyOffspring(Propagator):  # type: ignore[misc]
    """Breeds another propagator's offspring, each as an individual of its own.

    Where no step of a composed propagator applies, Propulate returns the parent itself, which would then be changed and
    join its population twice.
    """

    def __init__(self, propagator: Propagator) -> None:
        super().__init__(propagator.parents, propagator.offspring, propagator.rng)
        self._propagator = propagator

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        individual = copy.deepcopy(self._propagator(population))
        individual.loss = math.inf
        return individual


class Deduplicate(Propagator):  # type: ignore[misc]
    """Asks another propagator again while its offspring is known to the run, or breaks the rules of the space.

    After some tries it draws at random.
    """

    def __init__(self, propagator: Propagator, past: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(propagator.parents, propagator.offspring, rng)
        self._propagator = propagator
        self._history = past
        self._random_search = RandomSearch(past, rng)

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual that is new to the run, if there is one; who is not active has no part in it."""
        self._history.update()
        population = [one for one in population if one.active]
        for _ in range(_MOST_TRIES):
            individual = self._propagator(population)
            params = self._history.space.decode(individual)
            if not self._history.is_known(params) and self._history.space.allows(params):
                return individual
        return self._random_search(population)


class UnitCubeAdapter(Propagator):  # type: ignore[misc]
    """Breeds by a propagator of floats, for which each parameter is a float from 0 to 1.

    `make` is called with these limits, and returns the propagator.
    """

    def __init__(
        self, past: EvaluationHistory, make_on_cube: Callable[[dict[str, tuple[float, float]]], Propagator]
    ) -> None:
        self._history = past
        self._limits = past.space.list_gene_limits()
        self._cube = dict.fromkeys(self._limits, (0.0, 1.0))
        self._propagator = make_on_cube(self._cube)
        super().__init__(self._propagator.parents, self._propagator.offspring, self._propagator.rng)
        self._low, self._width = past.low, np.where(past.high > past.low, past.high - past.low, 1.0)
        self._random_search = RandomSearch(past, self._propagator.rng)
        self._scaled: dict[int, tuple[Individual, Individual]] = {}  # by id; the original is kept, so its id is unique

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        if not population:
            return self._random_search(population)  # a particle swarm needs an individual to begin with
        # Islands exchange copies, which would leave Propulate's CMA-ES with too few different ones.
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


def _make_tpe(past: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    from hpo.breeding.tpe import TPEPropagator

    return TPEPropagator(past, rng)


def _make_cmaes(past: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    return UnitCubeAdapter(past, lambda cube: CMAPropagator(ActiveCMA(), cube, rng=rng))


def _make_pso(past: EvaluationHistory, rng: random.Random, _: int, place: int) -> Propagator:
    # Both factors as Clerc and Kennedy derived them (2002), which Propulate's examples use too.
    return UnitCubeAdapter(past, lambda cube: StatelessPSO(1.49445, 1.49445, place, cube, rng))


def _make_nelder_mead(past: EvaluationHistory, rng: random.Random, _: int, __: int) -> Propagator:
    start = np.array([rng.random() for _ in past.low])
    return UnitCubeAdapter(past, lambda cube: ParallelNelderMead(cube, rng, start, scale=0.25))


def _make_propulate(past: EvaluationHistory, rng: random.Random, workers: int, _: int) -> Propagator:
    """Make Propulate's default genetic propagator, with a breeding population of twice the island's workers."""
    return CopyOffspring(get_default_propagator(max(4, 2 * workers), past.space.list_gene_limits(), rng=rng))


_MAKERS: dict[str, Callable[[EvaluationHistory, random.Random, int, int], Propagator]] = {
    "ga": lambda past, rng, *_: GeneticPropagator(past, rng),
    "tpe": _make_tpe,
    "cmaes": _make_cmaes,
    "pso": _make_pso,
    "nelder-mead": _make_nelder_mead,
    "propulate": _make_propulate,
    "random": lambda past, rng, *_: RandomSearch(past, rng),
}


def make_propagator(name: str, past: EvaluationHistory, rng: random.Random, workers: int, place: int) -> Propagator:
    """Return a propagator for one worker: `workers` is the size of its island, `place` its number there, from 0."""
    return _MAKERS[name](past, rng, workers, place)
