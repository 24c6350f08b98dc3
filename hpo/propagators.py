"""How individuals are bred, as Propulate propagators."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping
from typing import Any

from hpo.space import Gene
from hpo.upstream import Individual, Propagator, get_default_propagator


class Fresh(Propagator):  # type: ignore[misc]
    """Another propagator's offspring, each an individual of its own.

    Where no step of a composed propagator applies, Propulate returns the parent itself, which would then be changed and
    join its population twice.
    """

    def __init__(self, propagator: Propagator) -> None:
        super().__init__(propagator.parents, propagator.offspring, propagator.rng)
        self._propagator = propagator

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        individual = copy.deepcopy(self._propagator(population))
        individual.loss = math.inf
        return individual


def default_propagator(limits: Mapping[str, tuple[Gene, Gene]], workers: int, rng: random.Random) -> Any:
    """Make Propulate's default genetic propagator, with a breeding population of twice the island's workers."""
    return Fresh(get_default_propagator(max(4, 2 * workers), dict(limits), rng=rng))
