"""Breed with propagators of Propulate."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np

from hpo.breeding.encoding import Vector
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual
from hpo.breeding.propagator import Propagator
from hpo.breeding.propulate_compat import (
    ActiveCMA,
    CMAPropagator,
    ParallelNelderMead,
    PropulateIndividual,
    StatelessPSO,
    get_default_propagator,
)
from hpo.space import Gene

# Propulate's propagators return an individual, bred from a list of individuals.
_Breed = Callable[[list[PropulateIndividual]], PropulateIndividual]


class DefaultPropagator(Propagator):
    """Breeds by Propulate's default genetic propagator.

    Args:
        workers: The number of workers of the island. The breeding population is twice as large.
    """

    def __init__(self, history: EvaluationHistory, rng: random.Random, worker: int, workers: int) -> None:
        super().__init__(history, rng, worker)
        limits = history.space.list_gene_limits()
        self._converter = _Converter(limits)
        self._breed: _Breed = get_default_propagator(max(4, 2 * workers), limits, rng=rng)

    def breed(self, population: list[Individual]) -> dict[str, Gene]:
        """Return the genes of an offspring. They are a parent's if no operator applies."""
        bred = self._breed([self._converter.convert(one, one.position) for one in population])
        return {name: bred[name] for name in self.history.space.parameters}


class CubePropagator(Propagator):
    """Breeds by a propagator of Propulate that supports only floats.

    Each parameter is converted to a float from 0 to 1.

    Args:
        name: "cmaes", "pso" or "nelder-mead".
    """

    def __init__(self, history: EvaluationHistory, rng: random.Random, worker: int, name: str) -> None:
        super().__init__(history, rng, worker)
        self._cube = dict.fromkeys(history.space.parameters, (0.0, 1.0))
        self._converter = _Converter(self._cube)
        self._breed = self._make_on_cube(name)

    def _make_on_cube(self, name: str) -> _Breed:
        propagator: _Breed
        if name == "cmaes":
            propagator = CMAPropagator(ActiveCMA(), self._cube, rng=self.rng)
        elif name == "pso":
            # Clerc and Kennedy (2002) derived both factors. Propulate's examples use the same.
            propagator = StatelessPSO(1.49445, 1.49445, self._worker, self._cube, self.rng)
        else:
            start = np.array([self.rng.random() for _ in self._cube])
            propagator = ParallelNelderMead(self._cube, self.rng, start, scale=0.25)
        return propagator

    def breed(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of an offspring; None for the first individual."""
        if not population:
            return None
        encoding = self.history.encoding
        # Islands exchange copies. With them, Propulate's CMA-ES would have too few different ones.
        different = {individual.position.tobytes(): individual for individual in population}
        scaled = [
            self._converter.convert(one, (one.position - encoding.low) / encoding.width) for one in different.values()
        ]
        bred = self._breed(scaled)
        return encoding.name_genes(encoding.low + np.clip(bred.position, 0, 1) * encoding.width)


class _Converter:
    """Converts individuals to those of Propulate, each once.

    Args:
        limits: The lowest and the highest gene of each parameter.
    """

    def __init__(self, limits: Mapping[str, tuple[Gene, Gene]]) -> None:
        self._limits = limits
        # By id. The original is stored, too, so that its id stays unique.
        self._converted: dict[int, tuple[Individual, PropulateIndividual]] = {}

    def convert(self, individual: Individual, position: Vector) -> PropulateIndividual:
        """Return an individual of Propulate with these genes, shape `(genes,)`."""
        if id(individual) not in self._converted:
            converted = PropulateIndividual(position.copy(), self._limits)
            for name in ("loss", "generation", "rank", "island"):
                setattr(converted, name, getattr(individual, name))
            self._converted[id(individual)] = (individual, converted)
        return self._converted[id(individual)][1]
