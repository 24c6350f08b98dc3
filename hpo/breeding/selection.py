"""Select the individuals that leave an island or are replaced on it, for several objectives.

The order is that of NSGA-II: by dominance, and then by crowding (Deb et al., A fast and elitist multiobjective genetic
algorithm: NSGA-II, 2002). Each individual has the attribute `costs`, whose first element is its `loss`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from hpo.breeding.propulate_compat import Individual, Propagator
from hpo.dominance import Costs, find_non_dominated, sort_best_first


def collect_costs(population: Sequence[Individual]) -> Costs:
    """Return the costs of individuals, shape `(individuals, objectives)`."""
    return np.array([individual.costs for individual in population], float)


class EmigrantSelection(Propagator):  # type: ignore[misc]
    """Selects emigrants (individuals that go to another island) at random from the Pareto front of their island.

    The order of NSGA-II is not used, because its first individuals are always the ends of the front.
    If the front is too small, other individuals are drawn at random, too.

    Args:
        offspring: The number of emigrants.
        rng: The random number generator.
    """

    def __init__(self, offspring: int, rng: random.Random) -> None:
        super().__init__(-1, offspring, rng)

    def __call__(self, population: list[Individual]) -> list[Individual]:
        """Return the emigrants from a population."""
        is_best = find_non_dominated(collect_costs(population))
        best = [individual for individual, is_chosen in zip(population, is_best, strict=True) if is_chosen]
        chosen: list[Individual] = self.rng.sample(best, min(self.offspring, len(best)))
        rest = [individual for individual in population if not any(individual is emigrant for emigrant in chosen)]
        return [*chosen, *self.rng.sample(rest, self.offspring - len(chosen))]


class ReplacementSelection(Propagator):  # type: ignore[misc]
    """Selects the individuals that immigrants replace: the worst in the order of NSGA-II.

    Args:
        offspring: The number of individuals to replace.
    """

    def __init__(self, offspring: int) -> None:
        super().__init__(-1, offspring)

    def __call__(self, population: list[Individual]) -> list[Individual]:
        """Return the individuals to replace in a population."""
        order = sort_best_first(collect_costs(population))
        return [population[index] for index in order[len(order) - self.offspring :]]
