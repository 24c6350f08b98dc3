"""The interface of all propagators: ask for an individual, evaluate it, and tell its loss."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual
from hpo.space import Gene

_MOST_TRIES = 10  # A converged propagator may breed only known individuals.


class Propagator(ABC):
    """Breeds the individuals of one worker.

    It sends no messages between ranks. Propagators of Propulate (cmaes, pso, nelder-mead,
    propulate) import mpi4py, which initialises MPI.

    Args:
        history: The evaluations of all workers.
        worker: The index of the worker on its island.
        workers: The number of workers of the island.

    Attributes:
        population: The evaluated individuals of the island, which can become parents.
    """

    def __init__(
        self, history: EvaluationHistory, rng: random.Random, worker: int = 0, workers: int = 1
    ) -> None:
        self.history = history
        self.rng = rng
        self.population: list[Individual] = []
        self._worker = worker
        self._workers = workers

    def ask(self) -> Individual:
        """Breed an individual that is new to the run and satisfies the constraints.

        If ten tries do not breed one, it is drawn at random. If nothing new is left, any random
        individual is returned.
        """
        self.history.update()
        individual = self._breed_new()
        individual.rank = individual.current = self._worker
        self.history.start(individual)
        return individual

    def tell(
        self, individual: Individual, loss: float, *others: float, seconds: float = math.nan
    ) -> None:
        """Add an evaluated individual to the population.

        Args:
            individual: An individual that `ask` returned.
            loss: The loss; infinite or NaN if the evaluation has failed.
            others: The values of the other objectives.
            seconds: The duration of the evaluation. Default: unknown.
        """
        individual.loss = loss if math.isfinite(loss) else math.inf
        values = (individual.loss, *others)
        individual.costs = self.history.objectives.compute_costs(values)
        self.population.append(individual)
        self.history.end(individual, values, seconds)

    def _breed_new(self) -> Individual:
        # Individuals that were replaced cannot be parents.
        population = [individual for individual in self.population if individual.active]
        for _ in range(_MOST_TRIES):
            individual = self._make_individual(self.breed(population))
            is_known = self.history.is_known(individual.params)
            if not is_known and self.history.space.allows(individual.params):
                return individual
        return self._make_individual(None)

    def _make_individual(self, genes: Mapping[str, Gene] | None) -> Individual:
        """Return an individual with these genes; for None, a random one, if possible new."""
        space = self.history.space
        if genes is None:
            genes = space.encode(self.history.draw_new(self.rng) or space.draw(self.rng))
        return Individual(space, genes)

    @abstractmethod
    def breed(self, population: list[Individual]) -> Mapping[str, Gene] | None:
        """Return the genes of an offspring, which may be known; None for a random individual.

        Args:
            population: The individuals of the island that can be parents.
        """


class RandomPropagator(Propagator):
    """Draws individuals at random from the whole search space."""

    def breed(self, population: list[Individual]) -> None:
        """Return None, for a random individual."""
