"""The individuals of an island, and which of them leave it or are replaced on it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

from hpo.breeding.encoding import Vector
from hpo.dominance import Costs, find_non_dominated, sort_best_first
from hpo.space import Gene, SearchSpace


class Individual:
    """A set of hyperparameters that is bred and evaluated, with the attributes of Propulate's.

    Attributes:
        params: The hyperparameters: the values of all active parameters.
        position: The genes, active or inactive, shape `(genes,)`.
        trial: The number of the evaluation, which identifies the individual; -1 before it starts.
        loss: The loss; infinite until the individual is evaluated, and if it fails.
        costs: The costs of all objectives, the loss first.
        island: The island where it was bred.
        rank: The index of its worker on this island.
        current: The index of the worker on its present island that may let it emigrate.
        active: Whether the individual is still on the island, and can be a parent.
    """

    def __init__(self, space: SearchSpace, genes: Mapping[str, Gene]) -> None:
        self.params = space.decode(genes)
        self.position: Vector = np.array([genes[name] for name in space.parameters], float)
        self.trial = -1
        self.loss = math.inf
        self.costs: tuple[float, ...] = ()
        self.island = -1
        self.rank = -1
        self.current = -1
        self.active = True
        self.migration_steps = 0
        self.migration_history = ""

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same individual, or copies of it that are both active or not.

        Each worker compares each immigrant with its whole population. To compare all genes, as
        Propulate's individuals do, would take a quarter of its time at 3,600 evaluations.
        """
        return (
            isinstance(other, Individual)
            and self.trial == other.trial
            and self.active == other.active
        )

    def __contains__(self, name: object) -> bool:
        """Return False: Propulate looks for the data of its surrogates."""
        return False


def collect_costs(population: Sequence[Individual]) -> Costs:
    """Return the costs of individuals, shape `(individuals, objectives)`."""
    return np.array([individual.costs for individual in population], float)


def select_emigrants(
    count: int, rng: random.Random, population: list[Individual]
) -> list[Individual]:
    """Return individuals that go to another island, at random from the Pareto front of theirs.

    The order of NSGA-II is not used, because its first individuals are always the ends of the
    front. If the front is too small, other individuals are drawn at random, too.
    """
    is_best = find_non_dominated(collect_costs(population))
    best = [population[index] for index in np.flatnonzero(is_best)]
    chosen = rng.sample(best, min(count, len(best)))
    chosen_ids = {id(emigrant) for emigrant in chosen}
    rest = [individual for individual in population if id(individual) not in chosen_ids]
    return [*chosen, *rng.sample(rest, count - len(chosen))]


def select_replaced(count: int, population: list[Individual]) -> list[Individual]:
    """Return the individuals that immigrants replace: the worst in the order of NSGA-II.

    The order is by dominance, and then by crowding (Deb et al., A fast and elitist multiobjective
    genetic algorithm: NSGA-II, 2002).
    """
    order = sort_best_first(collect_costs(population))
    return [population[index] for index in order[len(order) - count :]]
