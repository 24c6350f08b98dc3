"""The interface of all propagators (`ask` and `tell`), and the table of their names."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name

from hpo.breeding.evaluation_history import (
    EvaluationHistory,
    RecordedHistory,
    sort_for_learning,
)
from hpo.breeding.population import Individual
from hpo.objectives import Objectives
from hpo.options import PROPAGATORS
from hpo.space import Gene, SearchSpace
from hpo.store.evaluations import Evaluation

_MOST_TRIES = 10  # A converged propagator may breed only known individuals.
# Each module is imported when it is needed: Optuna takes 0.4 s, and Propulate initialises MPI.
_CLASSES = {
    "ga": "hpo.breeding.genetic:GeneticPropagator",
    "tpe": "hpo.breeding.tpe:TPEPropagator",
    "cmaes": "hpo.breeding.propulate_compat:CMAESPropagator",
    "pso": "hpo.breeding.propulate_compat:PSOPropagator",
    "nelder-mead": "hpo.breeding.propulate_compat:NelderMeadPropagator",
    "propulate": "hpo.breeding.propulate_compat:DefaultPropagator",
    "random": "hpo.breeding.propagators:RandomPropagator",
}


class Propagator(ABC):
    """Breeds the individuals of one worker.

    It sends no messages between ranks. Propagators of Propulate (cmaes, pso, nelder-mead,
    propulate) import mpi4py, which initialises MPI. The arguments are those of `make_propagator`.

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

        Call `history.update()` before. If ten tries do not breed one, it is drawn at random. If
        nothing new is left, any random individual is returned.
        """
        space = self.history.space
        # Individuals that were replaced cannot be parents.
        population = [individual for individual in self.population if individual.active]
        for _ in range(_MOST_TRIES):
            individual = Individual(space, self.breed(population) or self._draw_genes())
            is_known = self.history.is_known(individual.params)
            if not is_known and space.allows(individual.params):
                break
        else:
            individual = Individual(space, self._draw_genes())
        individual.rank = self._worker
        individual.current = self._worker
        self.history.start(individual)
        return individual

    def _draw_genes(self) -> Mapping[str, Gene]:
        """Return the genes of a random individual, which is new to the run if possible."""
        space = self.history.space
        return space.encode(self.history.draw_new(self.rng) or space.draw(self.rng))

    def tell(
        self, individual: Individual, loss: float, *others: float, seconds: float = math.nan
    ) -> None:
        """Add an evaluated individual, which `ask` returned, to the population.

        The loss is infinite or NaN if the evaluation has failed. The values of the other objectives
        follow. The duration may be unknown.
        """
        individual.loss = loss if math.isfinite(loss) else math.inf
        values = (individual.loss, *others)
        individual.costs = self.history.objectives.compute_costs(values)
        self.population.append(individual)
        self.history.end(individual, values, seconds)

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
    propagator: type[Propagator] = resolve_name(_CLASSES[name])
    return propagator(history or EvaluationHistory(space), random.Random(seed), worker, workers)


def make_following_propagator(
    name: str,
    space: SearchSpace,
    objectives: Objectives,
    seed: str,
    read_changes: Callable[[], Sequence[Evaluation]],
) -> Propagator:
    """Return a propagator that learns from recorded evaluations alone, when its history is updated.

    Args:
        name: A name in `hpo.options.PROPAGATORS_WITHOUT_MPI`.
        read_changes: Returns the evaluations that have started or ended since its previous call.
    """

    def read_sorted_changes() -> Sequence[Evaluation]:
        changes = sort_for_learning(read_changes())
        for evaluation in changes:
            if evaluation.is_finished:
                individual = Individual(space, space.encode(evaluation.params))
                propagator.tell(individual, *evaluation.values)
        return changes

    history = RecordedHistory(space, objectives, read_sorted_changes)
    propagator = make_propagator(name, space, seed, history)
    return propagator
