"""Make propagators by their names."""

from __future__ import annotations

import random
from pkgutil import resolve_name

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.propagator import Propagator
from hpo.options import PROPAGATORS
from hpo.space import SearchSpace

# Each module is imported when it is needed: Optuna takes 0.4 s, and Propulate initialises MPI.
_CLASSES = {
    "ga": "hpo.breeding.genetic:GeneticPropagator",
    "tpe": "hpo.breeding.tpe:TPEPropagator",
    "cmaes": "hpo.breeding.propulate_compat:CMAESPropagator",
    "pso": "hpo.breeding.propulate_compat:PSOPropagator",
    "nelder-mead": "hpo.breeding.propulate_compat:NelderMeadPropagator",
    "propulate": "hpo.breeding.propulate_compat:DefaultPropagator",
    "random": "hpo.breeding.propagator:RandomPropagator",
}


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
