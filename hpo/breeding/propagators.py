"""Make propagators by their names."""

from __future__ import annotations

import random

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual
from hpo.breeding.propagator import Propagator
from hpo.options import PROPAGATORS
from hpo.space import SearchSpace


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
    if name == "random":
        return RandomPropagator(history, rng, worker)
    # Initialises MPI.
    from hpo.breeding.propulate_compat import CubePropagator, DefaultPropagator

    if name == "propulate":
        return DefaultPropagator(history, rng, worker, workers)
    return CubePropagator(history, rng, worker, name)


class RandomPropagator(Propagator):
    """Draws individuals at random from the whole search space."""

    def breed(self, population: list[Individual]) -> None:
        """Return None, for a random individual."""
