"""Simulate asynchronous workers without MPI, with real propagators and migration."""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from benchmarks.searchers import Searcher
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual, select_emigrants, select_replaced
from hpo.breeding.propagators import make_propagator
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.space import SearchSpace

WORKERS = 8
Values = Union[float, tuple[float, ...]]  # A loss, or the values of several objectives.
_EXCHANGE = 0.9  # The default migration probability.


class SimulatedIslands:
    """Islands as in `hpo.breeding`. They exchange copies of individuals, without delay."""

    def __init__(
        self,
        space: SearchSpace,
        names: Sequence[str],
        islands: int,
        seed: int,
        workers: int = WORKERS,
        objectives: Objectives = ONLY_LOSS,
    ) -> None:
        self.history = EvaluationHistory(space, objectives)
        self._rng = random.Random(seed)
        self._emigration_rng = random.Random(seed)
        self._size = workers // islands
        self._populations: list[list[Individual]] = [[] for _ in range(islands)]
        self._pending: dict[int, Individual] = {}
        self._propagators = []
        for worker in range(workers):
            island, index = divmod(worker, self._size)
            propagator = make_propagator(
                names[island % len(names)],
                space,
                f"{seed}/{worker}",
                self.history,
                workers=self._size,
                worker=index,
            )
            propagator.population = self._populations[island]
            self._propagators.append(propagator)

    def ask(self, worker: int) -> dict[str, Any]:
        """Breed an individual on the island of the worker."""
        individual = self._pending[worker] = self._propagators[worker].ask()
        return individual.params

    def start(self, worker: int, params: dict[str, Any]) -> dict[str, Any]:
        """Start an evaluation of given hyperparameters on the island of the worker."""
        space = self.history.space
        individual = self._pending[worker] = Individual(space, space.encode(params))
        individual.rank = individual.current = worker % self._size
        self.history.start(individual)
        return individual.params

    def tell(self, worker: int, loss: float, *others: float, seconds: float = 0.0) -> None:
        """Add the worker's individual to its island, and copy one of the best to the other islands.

        `others` are the values of all objectives except the loss. An evaluation with an infinite
        loss has failed.
        """
        asked = self._pending.pop(worker)
        space = self.history.space
        # As in a run, the record has the hyperparameters, but no inactive genes.
        individual = Individual(space, space.encode(asked.params))
        individual.trial = asked.trial
        individual.rank = individual.current = asked.rank
        self._propagators[worker].tell(individual, loss, *others, seconds=seconds)
        if self._rng.random() > _EXCHANGE:
            return
        own = self._populations[worker // self._size]
        (best,) = select_emigrants(1, self._emigration_rng, own)
        for population in self._populations:
            if population is not own:
                self._add_migrant(copy.deepcopy(best), population)

    def _add_migrant(self, migrant: Individual, population: list[Individual]) -> None:
        migrant.current = self._rng.randrange(self._size)
        population.append(migrant)
        replaceable = [one for one in population if one.current == migrant.current]
        (worst,) = select_replaced(1, replaceable)
        population[:] = [one for one in population if one is not worst]


def simulate(
    searcher: Searcher,
    evaluate: Callable[[dict[str, Any]], tuple[Values, float]],
    evaluations: int,
    workers: int = WORKERS,
) -> npt.NDArray[np.float64]:
    """Run a search in simulated time, and return the losses in the order of ends.

    `evaluate` returns a loss, or the values of several objectives, and the seconds that the
    evaluation takes. The result has shape (evaluations,) or (evaluations, objectives).
    """
    events: list[tuple[float, int, Values]] = []
    results: list[Values] = []
    started = 0

    def start_evaluation(worker: int, now: float) -> None:
        nonlocal started
        values, seconds = evaluate(searcher.ask(worker))
        heapq.heappush(events, (now + seconds, worker, values))
        started += 1

    for worker in range(workers):
        start_evaluation(worker, 0.0)
    while events:
        now, worker, values = heapq.heappop(events)
        searcher.tell(worker, *(values if isinstance(values, tuple) else (values,)))
        results.append(values)
        if started < evaluations:
            start_evaluation(worker, now)
    return np.array(results)
