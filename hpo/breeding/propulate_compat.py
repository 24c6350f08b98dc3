"""All that uses Propulate: the exchange of individuals, and its propagators.

Propulate's own loop, `propulate`, is not used. It would breed and evaluate by callbacks, end after
a fixed number of generations, and write pickles. Islands (`hpo.breeding.islands`) call its steps.
"""

from __future__ import annotations

import random
import sys
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.breeding.encoding import Vector
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual, select_emigrants, select_replaced
from hpo.breeding.propagators import Propagator
from hpo.space import Gene

if TYPE_CHECKING:
    from hpo.layout import Layout
    from hpo.ranks.communicator import SleepingComm


def _make_stand_in(name: str) -> ModuleType:
    """Return a stand-in for a module, which is imported when an attribute of it is used."""
    stand_in = ModuleType(name)
    vars(stand_in)["__getattr__"] = lambda attribute: getattr(import_module(name), attribute)
    return stand_in


# Only unused parts of Propulate need these modules: its surrogates and its checks for duplicates.
# Their import takes 0.8 s and 0.1 s of CPU time on every rank, and GPy may not be installed.
_absent = {"GPy", "deepdiff"} - sys.modules.keys()
sys.modules.update({name: _make_stand_in(name) for name in _absent})

from propulate import Individual as PropulateIndividual  # noqa: E402
from propulate import (  # noqa: E402
    Migrator,
    Pollinator,
    get_default_propagator,
    migrator,
    pollinator,
)
from propulate.propagators import (  # noqa: E402
    ActiveCMA,
    CMAPropagator,
    ParallelNelderMead,
    StatelessPSO,
)

for _name in _absent:
    del sys.modules[_name]

__all__ = [
    "CMAESPropagator",
    "DefaultPropagator",
    "Exchange",
    "NelderMeadPropagator",
    "PSOPropagator",
    "PropulateIndividual",
]

# Both assert that migrants are of this class. Individuals are not of Propulate's class, because
# propagators must work without MPI, which Propulate initialises.
migrator.Individual = Individual
pollinator.Individual = Individual


class Exchange:
    """Exchanges individuals between the island of a worker and other islands.

    Collective: construct it on all leaders. The migration probability is the expected number of
    migrations from an island while each of its workers breeds one generation. With pollination,
    copies of individuals are sent. Otherwise, individuals move.

    All workers of an island know its individuals from the record. Messages only announce which
    individuals have arrived from other islands, and which have left or were replaced.

    Attributes:
        population: The individuals of the island that this worker knows.
    """

    def __init__(
        self,
        leaders: SleepingComm,
        layout: Layout,
        rng: random.Random,
        *,
        migration_probability: float,
        pollination: bool,
        is_multi_objective: bool,
    ) -> None:
        self._island = layout.find_island(leaders.rank)
        self._has_other_islands = layout.islands > 1
        self._rng = rng
        self._comm = leaders.split(self._island, leaders.rank)
        sizes = [layout.count_island_workers(island) for island in range(layout.islands)]
        options: dict[str, Any] = {}
        if is_multi_objective:
            options["emigration_propagator"] = lambda count: partial(select_emigrants, count, rng)
        if is_multi_objective and pollination:
            options["immigration_propagator"] = lambda count: partial(select_replaced, count)
        # Propulate unpickles files in its checkpoint path. A new folder has none.
        with tempfile.TemporaryDirectory() as empty:
            self._propulator = (Pollinator if pollination else Migrator)(
                loss_fn=None,
                propagator=None,
                rng=rng,
                island_idx=self._island,
                island_comm=self._comm,
                propulate_comm=leaders,
                generations=-1,  # With 0, Propulate leaves the object without a population.
                checkpoint_path=empty,
                migration_topology=1 - np.eye(len(sizes), dtype=int),
                migration_prob=migration_probability / sizes[self._island],
                island_displs=np.array([layout.find_first_worker(i) for i in range(len(sizes))]),
                island_counts=np.array(sizes),
                **options,
            )
        self.population: list[Individual] = self._propulator.population
        # Propulate calls this six times in each generation, five times for its log. `migrate` drops
        # inactive individuals, which have left or were replaced.
        self._propulator._get_active_individuals = lambda: (self.population, len(self.population))
        if pollination:
            self._deactivate = self._propulator._deactivate_replaced_individuals
        else:
            self._deactivate = self._propulator._deactivate_emigrants

    def migrate(self) -> None:
        """Send the best of the island to other islands, with a probability, and receive theirs.

        Immigrants replace individuals.
        """
        self.population[:] = [member for member in self.population if member.active]
        if self._propulator.migration_prob > 0:
            is_due = self._rng.random() < self._propulator.migration_prob
            # With a single island, Propulate's Migrator would raise an error.
            if is_due and self._has_other_islands:
                self._propulator._send_emigrants()
            self._propulator._receive_immigrants()
            self._deactivate()

    def count_immigrants(self) -> dict[str, int]:
        """Return the number of immigrants in the population, by the island that bred them."""
        members = [member for member in self.population if member.active]
        islands = Counter(member.island for member in members if member.island != self._island)
        return {str(island): count for island, count in islands.items()}

    def close(self) -> None:
        """Drop the pending messages of the island. Collective: call on all its leaders."""
        self._comm.drop_messages()


class DefaultPropagator(Propagator):
    """Breeds by Propulate's default genetic propagator.

    Its breeding population is twice as large as the number of workers of the island.
    """

    def __init__(
        self, history: EvaluationHistory, rng: random.Random, worker: int = 0, workers: int = 1
    ) -> None:
        super().__init__(history, rng, worker, workers)
        limits = history.space.list_gene_limits()
        self._converter = _Converter(limits)
        self._breed = get_default_propagator(max(4, 2 * self._workers), limits, rng=rng)

    def breed(self, population: list[Individual]) -> dict[str, Gene]:
        """Return the genes of an offspring. They are a parent's if no operator applies."""
        bred = self._breed([self._converter.convert(one) for one in population])
        return {name: bred[name] for name in self.history.space.parameters}


class CubePropagator(Propagator):
    """Breeds by a propagator of Propulate that supports only floats.

    Each parameter is converted to a float from 0 to 1. The subclasses make the propagator.
    """

    def __init__(
        self, history: EvaluationHistory, rng: random.Random, worker: int = 0, workers: int = 1
    ) -> None:
        super().__init__(history, rng, worker, workers)
        self._cube = dict.fromkeys(history.space.parameters, (0.0, 1.0))
        self._converter = _Converter(self._cube, history.encoding.low, history.encoding.width)
        self._breed = self._make_on_cube()

    @abstractmethod
    def _make_on_cube(self) -> Any: ...

    def breed(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of an offspring; None for the first individual."""
        if not population:
            return None
        encoding = self.history.encoding
        # Islands exchange copies. With them, Propulate's CMA-ES would have too few different ones.
        different = {individual.position.tobytes(): individual for individual in population}
        bred = self._breed([self._converter.convert(one) for one in different.values()])
        return encoding.name_genes(encoding.low + np.clip(bred.position, 0, 1) * encoding.width)


class CMAESPropagator(CubePropagator):
    """Breeds by Propulate's active CMA-ES."""

    def _make_on_cube(self) -> Any:
        return CMAPropagator(ActiveCMA(), self._cube, rng=self.rng)


class PSOPropagator(CubePropagator):
    """Breeds by Propulate's particle swarm."""

    def _make_on_cube(self) -> Any:
        # Clerc and Kennedy (2002) derived both factors. Propulate's examples use the same.
        return StatelessPSO(1.49445, 1.49445, self._worker, self._cube, self.rng)


class NelderMeadPropagator(CubePropagator):
    """Breeds by Propulate's parallel Nelder-Mead."""

    def _make_on_cube(self) -> Any:
        start = np.array([self.rng.random() for _ in self._cube])
        return ParallelNelderMead(self._cube, self.rng, start, scale=0.25)


@dataclass
class _Converter:
    """Converts individuals to those of Propulate, each once.

    The numbers `low` are subtracted from the genes, which are then divided by `width`. The limits
    are those after the conversion.
    """

    limits: Mapping[str, tuple[Gene, Gene]]
    low: Vector | float = 0.0
    width: Vector | float = 1.0
    # By id. The original is stored, too, so that its id stays unique.
    converted: dict[int, tuple[Individual, PropulateIndividual]] = field(default_factory=dict)

    def convert(self, individual: Individual) -> PropulateIndividual:
        """Return the individual of Propulate."""
        if id(individual) not in self.converted:
            position = (individual.position - self.low) / self.width
            converted = PropulateIndividual(position, self.limits)
            # PSO continues the latest of a worker's particles.
            converted.generation = individual.trial
            converted.rank = individual.rank
            converted.loss = individual.loss
            self.converted[id(individual)] = (individual, converted)
        return self.converted[id(individual)][1]
