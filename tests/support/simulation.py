"""Simulate asynchronous workers without MPI, with the real propagators and the exchange between islands."""

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
from hpo.breeding.propagators import Deduplicate, make_propagator
from hpo.breeding.propulate_compat import Individual
from hpo.breeding.selection import EmigrantSelection, ReplacementSelection
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

WORKERS = 8
Values = Union[float, tuple[float, ...]]  # A loss, or the values of several objectives.
_EXCHANGE = 0.9  # The default migration probability.


class SimulatedIslands:
    """Islands as in `hpo.breeding`. They exchange individuals by pollination (migrants are copied), without delay."""

    def __init__(
        self,
        space: SearchSpace,
        names: Sequence[str],
        islands: int,
        seed: int,
        workers: int = WORKERS,
        objectives: Objectives = ONLY_LOSS,
    ) -> None:
        self._rng = random.Random(seed)
        self._news: list[Evaluation] = []
        self._past = EvaluationHistory(space, self._take_news, objectives, compute_scarcity=self.compute_scarcity)
        self._emigrants = EmigrantSelection(1, random.Random(seed))
        self._replaced = ReplacementSelection(1)
        self._islands = islands
        self._size = workers // islands
        self._populations: list[list[Individual]] = [[] for _ in range(islands)]
        self._propagators = []
        for worker in range(workers):
            rng = random.Random(f"{seed}/{worker}")
            name = names[worker // self._size % len(names)]
            propagator = make_propagator(name, self._past, rng, self._size, worker % self._size)
            self._propagators.append(Deduplicate(propagator, self._past, rng))
        self._pending: dict[int, tuple[int, Individual]] = {}
        self._count = 0

    def compute_scarcity(self, ended: int) -> float:  # noqa: ARG002 - for subclasses
        """Return how scarce time is after `ended` evaluations: not at all, without a time limit."""
        return 0.0

    def ask(self, worker: int) -> dict[str, Any]:
        """Breed an individual on the island of the worker."""
        return self._start(worker, self._propagators[worker](self._populations[worker // self._size]))

    def start(self, worker: int, params: dict[str, Any]) -> dict[str, Any]:
        """Start an evaluation of given hyperparameters on the island of the worker."""
        space = self._past.space
        return self._start(worker, Individual(dict(space.encode(params)), space.list_gene_limits()))

    def _start(self, worker: int, individual: Individual) -> dict[str, Any]:
        island = worker // self._size
        individual.current = individual.rank = worker % self._size
        individual.island, individual.generation = island, self._count
        params = self._past.space.decode(individual)
        self._pending[worker] = (self._count, individual)
        self._news.append(Evaluation(self._count, "running", np.inf, params, island, worker, self._count))
        self._count += 1
        return params

    def tell(self, worker: int, loss: float, *others: float, seconds: float = 0.0) -> None:
        """Add the worker's individual to its island, and copy one of the best of the island to the other islands.

        `others` are the values of all objectives except the loss. An evaluation with an infinite loss has failed.
        """
        trial, individual = self._pending.pop(worker)
        island = worker // self._size
        params = self._past.space.decode(individual)
        state = "complete" if np.isfinite(loss) else "failed"
        ended = Evaluation(
            *(trial, state, loss, params, island, worker, trial, seconds), ended=float(trial), other_values=others
        )
        self._news.append(ended)
        individual.loss, individual.costs = loss, self._past.objectives.compute_costs(ended.values)
        self._populations[island].append(individual)
        if self._rng.random() > _EXCHANGE:
            return
        (best,) = self._emigrants(self._populations[island])
        for other in range(self._islands):
            if other != island:
                migrant = copy.deepcopy(best)
                migrant.current = self._rng.randrange(self._size)
                self._populations[other].append(migrant)
                replaceable = [one for one in self._populations[other] if one.current == migrant.current]
                (worst,) = self._replaced(replaceable)
                self._populations[other] = [one for one in self._populations[other] if one is not worst]

    def _take_news(self) -> list[Evaluation]:
        news, self._news = self._news, []
        return news


def simulate(
    searcher: Searcher,
    evaluate: Callable[[dict[str, Any]], tuple[Values, float]],
    evaluations: int,
    workers: int = WORKERS,
) -> npt.NDArray[np.float64]:
    """Run a search in simulated time, and return the losses in the order in which the evaluations end.

    `evaluate` returns a loss, or the values of several objectives, and the seconds that the evaluation takes. The
    result has shape (evaluations,) or (evaluations, objectives).
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
