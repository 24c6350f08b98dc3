"""Who breeds, who leaves an island, and who makes room there, where several objectives count.

Deb et al., A fast and elitist multiobjective genetic algorithm: NSGA-II (2002): by dominance, and then by crowding.
An individual's `costs` travel with it; its `loss` is the first of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from hpo.breeding.propulate_compat import Individual, Propagator
from hpo.dominance import Costs, find_non_dominated, sort_best_first


def collect_costs(population: Sequence[Individual]) -> Costs:
    """Return the costs of individuals, shape (individuals, objectives)."""
    return np.array([individual.costs for individual in population], float)


class EmigrantSelection(Propagator):  # type: ignore[misc]
    """Sends individuals of the island's front, drawn at random: the best by dominance and crowding are its ends."""

    def __init__(self, offspring: int, rng: random.Random) -> None:
        super().__init__(-1, offspring, rng)

    def __call__(self, population: list[Individual]) -> list[Individual]:
        """Return the emigrants."""
        is_best = find_non_dominated(collect_costs(population))
        best = [individual for individual, is_one in zip(population, is_best, strict=True) if is_one]
        chosen: list[Individual] = self.rng.sample(best, min(self.offspring, len(best)))
        rest = [individual for individual in population if not any(individual is one for one in chosen)]
        return [*chosen, *self.rng.sample(rest, self.offspring - len(chosen))]


class ReplacementSelection(Propagator):  # type: ignore[misc]
    """Replaces the last by dominance, and of these the most crowded ones."""

    def __init__(self, offspring: int) -> None:
        super().__init__(-1, offspring)

    def __call__(self, population: list[Individual]) -> list[Individual]:
        """Return those to be replaced."""
        order = sort_best_first(collect_costs(population))
        return [population[place] for place in order[len(order) - self.offspring :]]
