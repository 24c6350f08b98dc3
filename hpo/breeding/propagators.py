"""Make propagators by their names, and breed with propagators of Propulate."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.propagator import Propagator
from hpo.breeding.propulate_compat import (
    ActiveCMA,
    CMAPropagator,
    GeneIndividual,
    Individual,
    ParallelNelderMead,
    StatelessPSO,
    get_default_propagator,
)
from hpo.options import PROPAGATORS
from hpo.space import Gene, SearchSpace

# Propulate's propagators return an individual, bred from a list of individuals.
_PropulatePropagator = Callable[[list[Individual]], GeneIndividual]


def make_propagator(
    name: str,
    space: SearchSpace,
    seed: int | str = 0,
    history: EvaluationHistory | None = None,
    workers: int = 1,
    worker: int = 0,
) -> Propagator:
    """Return a propagator for one worker.

    Args:
        name: A name in `hpo.options.PROPAGATORS`.
        history: The evaluations of all workers. Default: an empty history.
        workers: The number of workers of the island.
        worker: The index of the worker on its island.

    Raises:
        ValueError: `name` is unknown.

    Example:
        A search without MPI::

            propagator = make_propagator("ga", space, seed=0)
            for _ in range(50):
                individual = propagator.ask()
                propagator.tell(individual, compute_loss(individual.params))
    """
    if name not in PROPAGATORS:
        raise ValueError(f"name must be one of {', '.join(PROPAGATORS)}, got {name!r}")
    history = history or EvaluationHistory(space)
    rng = random.Random(seed)
    if name == "ga":
        from hpo.breeding.genetic import GeneticPropagator

        return GeneticPropagator(history, rng, worker)
    if name == "tpe":
        from hpo.breeding.tpe import TPEPropagator

        return TPEPropagator(history, rng, worker)
    if name == "propulate":
        return DefaultPropagator(history, rng, worker, workers)
    if name == "random":
        return RandomPropagator(history, rng, worker)
    return CubePropagator(history, rng, worker, name)


class RandomPropagator(Propagator):
    """Draws individuals at random from the whole search space."""

    def breed(self, population: list[Individual]) -> None:
        """Return None, for a random individual."""


class DefaultPropagator(Propagator):
    """Breeds by Propulate's default genetic propagator.

    Args:
        workers: The number of workers of the island. The breeding population is twice as large.
    """

    def __init__(self, history: EvaluationHistory, rng: random.Random, worker: int, workers: int) -> None:
        super().__init__(history, rng, worker)
        limits = history.space.list_gene_limits()
        self._breed: _PropulatePropagator = get_default_propagator(max(4, 2 * workers), limits, rng=rng)

    def breed(self, population: list[Individual]) -> dict[str, Gene]:
        """Return the genes of an offspring. They are a parent's if no operator applies."""
        bred = self._breed(population)
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
        self._breed = self._make_on_cube(name)
        # By id. The original is stored, too, so that its id stays unique.
        self._scaled: dict[int, tuple[Individual, GeneIndividual]] = {}

    def _make_on_cube(self, name: str) -> _PropulatePropagator:
        propagator: _PropulatePropagator
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
        # Islands exchange copies. With them, Propulate's CMA-ES would have too few different ones.
        different = {individual.position.tobytes(): individual for individual in population}
        bred = self._breed([self._scale(individual) for individual in different.values()])
        encoding = self.history.encoding
        return encoding.name_genes(encoding.low + np.clip(bred.position, 0, 1) * encoding.width)

    def _scale(self, individual: Individual) -> GeneIndividual:
        if id(individual) not in self._scaled:
            encoding = self.history.encoding
            position = (individual.position - encoding.low) / encoding.width
            scaled = GeneIndividual(position, self._cube)
            for name in ("loss", "generation", "rank", "island"):
                setattr(scaled, name, getattr(individual, name))
            self._scaled[id(individual)] = (individual, scaled)
        return self._scaled[id(individual)][1]
