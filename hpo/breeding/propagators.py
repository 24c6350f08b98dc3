"""The propagators by their names: how individuals are bred, on real islands and on simulated ones alike."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

import numpy as np

from hpo.breeding.genetic import Genetic
from hpo.breeding.past import Past
from hpo.breeding.upstream import (
    ActiveCMA,
    CMAPropagator,
    Individual,
    ParallelNelderMead,
    Propagator,
    StatelessPSO,
    get_default_propagator,
)

_TRIES = 10  # of a propagator, whose offspring may all be known: it may have converged


class Drawn(Propagator):  # type: ignore[misc]
    """Random search: individuals drawn from the whole space."""

    def __init__(self, past: Past, rng: random.Random) -> None:
        super().__init__(0, 1, rng)
        self._past = past

    def __call__(self, _: list[Individual]) -> Individual:
        """Draw one individual that is new to the run, if there is one."""
        space = self._past.space
        return Individual(dict(space.encode(self._past.draw_new(self.rng) or space.draw(self.rng))), space.limits())


class Fresh(Propagator):  # type: ignore[misc]
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


class New(Propagator):  # type: ignore[misc]
    """Asks another propagator again while its offspring is known to the run, or breaks the rules of the space.

    After some tries it draws at random.
    """

    def __init__(self, propagator: Propagator, past: Past, rng: random.Random) -> None:
        super().__init__(propagator.parents, propagator.offspring, rng)
        self._propagator = propagator
        self._past = past
        self._chance = Drawn(past, rng)

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual that is new to the run, if there is one; who is not active has no part in it."""
        self._past.update()
        population = [one for one in population if one.active]
        for _ in range(_TRIES):
            individual = self._propagator(population)
            params = self._past.space.decode(individual)
            if not self._past.knows(params) and self._past.space.allows(params):
                return individual
        return self._chance(population)


class OnUnitCube(Propagator):  # type: ignore[misc]
    """Breeds by a propagator of floats, for which each parameter is a float from 0 to 1.

    `make` is called with these limits, and returns the propagator.
    """

    def __init__(self, past: Past, make: Callable[[dict[str, tuple[float, float]]], Propagator]) -> None:
        self._past = past
        self._limits = past.space.limits()
        self._cube = dict.fromkeys(self._limits, (0.0, 1.0))
        self._propagator = make(self._cube)
        super().__init__(self._propagator.parents, self._propagator.offspring, self._propagator.rng)
        self._low, self._width = past.low, np.where(past.high > past.low, past.high - past.low, 1.0)
        self._chance = Drawn(past, self._propagator.rng)
        self._scaled: dict[int, tuple[Individual, Individual]] = {}  # by id; the original is kept, so its id is unique

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        if not population:
            return self._chance(population)  # a particle swarm needs an individual to begin with
        # Islands exchange copies, which would leave Propulate's CMA-ES with too few different ones.
        different = {individual.position.tobytes(): individual for individual in population}
        bred = self._propagator([self._scale(individual) for individual in different.values()])
        genes = self._low + np.clip(bred.position, 0.0, 1.0) * self._width
        return Individual(self._past.space.rounded(dict(zip(self._limits, genes.tolist(), strict=True))), self._limits)

    def _scale(self, individual: Individual) -> Individual:
        if id(individual) not in self._scaled:
            scaled = Individual((individual.position - self._low) / self._width, self._cube)
            for name in ("loss", "generation", "rank", "island"):
                setattr(scaled, name, getattr(individual, name))
            self._scaled[id(individual)] = (individual, scaled)
        return self._scaled[id(individual)][1]


def _tpe(past: Past, rng: random.Random, _: int, __: int) -> Propagator:
    from hpo.breeding.parzen import Parzen

    return Parzen(past, rng)


def _cmaes(past: Past, rng: random.Random, _: int, __: int) -> Propagator:
    return OnUnitCube(past, lambda cube: CMAPropagator(ActiveCMA(), cube, rng=rng))


def _pso(past: Past, rng: random.Random, _: int, place: int) -> Propagator:
    # Both factors as Clerc and Kennedy derived them (2002), which Propulate's examples use too.
    return OnUnitCube(past, lambda cube: StatelessPSO(1.49445, 1.49445, place, cube, rng))


def _nelder_mead(past: Past, rng: random.Random, _: int, __: int) -> Propagator:
    start = np.array([rng.random() for _ in past.low])
    return OnUnitCube(past, lambda cube: ParallelNelderMead(cube, rng, start, scale=0.25))


def _propulate(past: Past, rng: random.Random, workers: int, _: int) -> Propagator:
    """Make Propulate's default genetic propagator, with a breeding population of twice the island's workers."""
    return Fresh(get_default_propagator(max(4, 2 * workers), past.space.limits(), rng=rng))


_MAKERS: dict[str, Callable[[Past, random.Random, int, int], Propagator]] = {
    "ga": lambda past, rng, *_: Genetic(past, rng),
    "tpe": _tpe,
    "cmaes": _cmaes,
    "pso": _pso,
    "nelder-mead": _nelder_mead,
    "propulate": _propulate,
    "random": lambda past, rng, *_: Drawn(past, rng),
}


def make(name: str, past: Past, rng: random.Random, workers: int, place: int) -> Propagator:
    """Return a propagator for one worker: `workers` is the size of its island, `place` its number there, from 0."""
    return _MAKERS[name](past, rng, workers, place)
