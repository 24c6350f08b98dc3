"""Measure the time that each propagator takes to breed an individual, on one core.

The script simulates a run with eight workers. One of them breeds with the propagator, and is timed. Before it breeds
an individual, it receives eight new evaluations of random individuals.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import numpy as np
from threadpoolctl import threadpool_limits

from hpo import Categorical, Float, Int, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.propagators import Deduplicate, make_propagator
from hpo.breeding.propulate_compat import Individual
from hpo.options import NUMERIC_PROPAGATORS, PROPAGATORS
from hpo.space import Parameter
from hpo.store.evaluations import Evaluation

WORKERS = 8
SUGGESTIONS = 24  # Individuals of one worker that are timed.
NUMBERS: dict[str, Parameter] = {"layers": Int(1, 20), "lr": Float(1e-5, 1.0, log=True), "gamma": Float(0.0, 1.0)}
SMALL = SearchSpace(**NUMBERS)
MIXED = SearchSpace(**NUMBERS, act=Categorical("relu", "tanh", "elu"))
LARGE = SearchSpace(**{f"x{place}": Float(0.0, 1.0) for place in range(20)})


class Run:
    """A run in which all workers except the timed one draw individuals at random."""

    def __init__(self, space: SearchSpace, known: int) -> None:
        self._space = space
        self._rng = random.Random(0)
        self._count = 0
        self._news: list[Evaluation] = []
        self.population: list[Individual] = []
        self.past = EvaluationHistory(space, self._take_news)
        for _ in range(known):
            self.evaluate()

    def evaluate(self) -> None:
        """Draw an individual at random and add its evaluation. The loss is a weighted sum of squares."""
        params = self._space.draw(self._rng)
        individual = Individual(dict(self._space.encode(params)), self._space.list_gene_limits())
        individual.loss = float(sum((1 + i) * gene**2 for i, gene in enumerate(individual.position)))
        individual.generation, individual.rank = self._count, self._count % 4
        number = self._count
        self._news.append(Evaluation(number, "complete", individual.loss, params, 0, 0, number, ended=number))
        self.population.append(individual)
        self._count += 1

    def _take_news(self) -> Iterable[Evaluation]:
        news, self._news = self._news, []
        return news


def time_suggestions(name: str, space: SearchSpace, known: int) -> list[float]:
    """Return the seconds that a propagator takes to breed each individual, without the first one.

    Args:
        name: Name of the propagator.
        space: Search space.
        known: Number of evaluations before the first individual is bred.
    """
    run, rng = Run(space, known), random.Random(0)
    breed = Deduplicate(make_propagator(name, run.past, rng, WORKERS // 2, 0), run.past, rng)
    breed(run.population)
    seconds = []
    for _ in range(SUGGESTIONS):
        for _ in range(WORKERS):
            run.evaluate()
        start = time.perf_counter()
        breed(run.population)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print the milliseconds that each propagator takes to breed an individual."""
    with threadpool_limits(1):
        for known in (100, 1_000, 10_000):
            print(f"milliseconds per individual with {known} known evaluations, mean (maximum)")
            for name in PROPAGATORS:
                for label, space in (
                    ("3 or 4 parameters", SMALL if name in NUMERIC_PROPAGATORS else MIXED),
                    ("20", LARGE),
                ):
                    taken = 1000 * np.array(time_suggestions(name, space, known))
                    print(f"    {name:12s}{label:>18s}: {taken.mean():6.1f} ({taken.max():.1f})", flush=True)


if __name__ == "__main__":
    main()
