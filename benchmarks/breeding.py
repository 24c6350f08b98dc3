"""Measure the time that each propagator takes to breed an individual, on one core.

The script simulates a run with eight workers. One of them breeds with the propagator, and is timed.
Before it breeds an individual, the other workers end seven evaluations of random individuals.
"""

from __future__ import annotations

import random
import time

import numpy as np
from threadpoolctl import threadpool_limits

from hpo import Categorical, Float, Int, SearchSpace
from hpo.breeding.population import Individual
from hpo.breeding.propagators import Propagator, make_propagator
from hpo.options import NUMERIC_PROPAGATORS, PROPAGATORS
from hpo.space import Parameter

WORKERS = 8
SUGGESTIONS = 24  # Individuals of one worker that are timed.
NUMBERS: dict[str, Parameter] = {
    "layers": Int(1, 20),
    "lr": Float(1e-5, 1.0, log=True),
    "gamma": Float(0.0, 1.0),
}
SMALL = SearchSpace(**NUMBERS)
MIXED = SearchSpace(**NUMBERS, act=Categorical("relu", "tanh", "elu"))
LARGE = SearchSpace(**{f"x{place}": Float(0.0, 1.0) for place in range(20)})


def evaluate_random(propagator: Propagator, rng: random.Random) -> None:
    """Evaluate a random individual on another worker."""
    space = propagator.history.space
    individual = Individual(space, space.encode(space.draw(rng)))
    propagator.history.start(individual)
    individual.rank = individual.trial % 4
    evaluate(propagator, individual)


def evaluate(propagator: Propagator, individual: Individual) -> None:
    """Evaluate an individual. The loss is a weighted sum of squares."""
    loss = sum((1 + index) * gene**2 for index, gene in enumerate(individual.position))
    propagator.tell(individual, float(loss))


def time_suggestions(name: str, space: SearchSpace, known: int) -> list[float]:
    """Return the seconds that a propagator takes to breed each individual, without the first one.

    Args:
        name: Name of the propagator.
        space: Search space.
        known: Number of evaluations before the first individual is bred.
    """
    rng = random.Random(0)
    propagator = make_propagator(name, space, workers=WORKERS // 2)
    for _ in range(known):
        evaluate_random(propagator, rng)
    evaluate(propagator, propagator.ask())
    seconds = []
    for _ in range(SUGGESTIONS):
        for _ in range(WORKERS - 1):
            evaluate_random(propagator, rng)
        start = time.perf_counter()
        individual = propagator.ask()
        seconds.append(time.perf_counter() - start)
        evaluate(propagator, individual)
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
                    print(
                        f"    {name:12s}{label:>18s}: {taken.mean():6.1f} ({taken.max():.1f})",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
