"""Propulate's islands, of the leaders of workers: filled with what the record knows, run until the budget is spent."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.parent_pool import ParentPool
from hpo.breeding.propagators import Deduplicate, make_propagator
from hpo.breeding.propulate_compat import Individual, Migrator, Pollinator
from hpo.errors import DuplicateError
from hpo.layout import Layout
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.ranks.communicator import SleepingComm
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.breeding.propagators import Deduplicate
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.study_client import StudyClient

# Claims an individual and evaluates it: returns hyperparameters, loss and metrics; None if nothing was to be claimed.
EvaluateClaim = Callable[
    ["Callable[[], Assignment | None]"], "tuple[dict[str, Any], float, Mapping[str, float]] | None"
]


class _BudgetSpent(Exception):  # noqa: N818 - the end, and no error
    """Ends Propulate's loop; by itself, it ends only after a number of generations."""


@dataclass(frozen=True)
class Archipelago:
    """The islands of a run: which workers they have, how they breed, and how they exchange individuals.

    The propagators are dealt to the islands in turn. With `inherits`, an individual may begin with the state of one of
    the best of its island.
    """

    space: SearchSpace
    layout: Layout
    propagators: Sequence[str]
    migration_probability: float = 0.9
    pollination: bool = True
    seed: int = 0
    objectives: Objectives = ONLY_LOSS
    uses_pbt: bool = False

    def evolve(self, leaders: SleepingComm, recorder: StudyClient, evaluate: EvaluateClaim) -> None:
        """Breed, claim and evaluate individuals until there is nothing more to claim; collective among all leaders.

        The rank of a leader is the number of its worker. The individuals of the evaluations that the record already
        holds are put back on their islands. Returns on all leaders at the same time, when all is durable.
        """
        worker = leaders.rank
        island = self.layout.find_island(worker)
        past = recorder.read_changes()
        rng = random.Random(f"{self.seed}/{worker}/{len(past)}")
        breeder = Breeder(self, worker, recorder, rng, past)

        def evaluate_individual(individual: Individual) -> float:
            evaluated = evaluate(partial(breeder.claim, individual, propulator))
            if evaluated is None:
                raise _BudgetSpent
            # Replaced individuals breed no more; Propulate would look through them several times a generation.
            propulator.population = [one for one in propulator.population if one.active]
            params, loss, metrics = evaluated
            genes = self.space.encode(params)
            individual.costs = self.objectives.compute_costs((loss, *self.objectives.select_metric_values(metrics)))
            for name in params:  # what does not exist keeps its gene, to be inherited
                individual[name] = genes[name]
            return loss

        propulator = self._join_island(leaders, island, evaluate_individual, breeder.propagator, rng)
        _restore_population(propulator, self, past, island)
        leaders.barrier()
        with suppress(_BudgetSpent):
            propulator.propulate(logging_interval=1000, debug=0)
        leaders.drop_messages()
        propulator.island_comm.drop_messages()
        recorder.flush()
        leaders.barrier()

    def _join_island(
        self,
        leaders: SleepingComm,
        island: int,
        evaluate_individual: Callable[[Individual], float],
        propagator: Deduplicate,
        rng: random.Random,
    ) -> Any:
        """Return this leader's part in an island, which exchanges with all others; it writes no checkpoints."""
        sizes = [self.layout.count_island_workers(each) for each in range(self.layout.islands)]
        kind = Pollinator if self.pollination else Migrator
        # Propulate unpickles what it finds at its checkpoint path, and finds nothing in a new folder.
        with tempfile.TemporaryDirectory() as empty:
            propulator = kind(
                loss_fn=evaluate_individual,
                propagator=propagator,
                rng=rng,
                island_idx=island,
                island_comm=leaders.split(island, leaders.rank),
                propulate_comm=leaders,
                generations=-1,
                checkpoint_path=empty,
                migration_topology=1 - np.eye(len(sizes), dtype=int),
                migration_prob=self.migration_probability / sizes[island],
                island_displs=np.array([self.layout.find_first_worker(each) for each in range(len(sizes))]),
                island_counts=np.array(sizes),
                **self._make_exchange_options(rng),
            )
        propulator._dump_checkpoint = lambda: None
        # Propulate asks six times a generation, five of them for its log. The propagator leaves out what is not active,
        # and so does `loss_of`.
        propulator._get_active_individuals = lambda: (propulator.population, len(propulator.population))
        return propulator

    def _make_exchange_options(self, rng: random.Random) -> dict[str, Any]:
        """Return who leaves an island, and who makes room there, where losses alone do not say it."""
        if not self.objectives.is_multi_objective:
            return {}
        from hpo.breeding.selection import EmigrantSelection, ReplacementSelection

        replaced = {"immigration_propagator": ReplacementSelection} if self.pollination else {}
        return {"emigration_propagator": partial(EmigrantSelection, rng=rng), **replaced}


class Breeder:
    """Breeds on a worker's leader, and claims what it has bred."""

    def __init__(
        self,
        islands: Archipelago,
        worker: int,
        recorder: StudyClient,
        rng: random.Random,
        known: Sequence[Evaluation],
    ) -> None:
        layout = islands.layout
        self._space = islands.space
        self._worker = worker
        self._island = layout.find_island(worker)
        self._seed = islands.seed
        self._propagator_name = islands.propagators[self._island % len(islands.propagators)]
        self._recorder = recorder
        lines = ParentPool(islands.space, self._island, layout.islands, islands.uses_pbt)
        self._history = EvaluationHistory(
            islands.space, recorder.read_changes, islands.objectives, recorder.is_stopping, lines
        )
        place = worker - layout.find_first_worker(self._island)
        bred_by = make_propagator(
            self._propagator_name, self._history, rng, layout.count_island_workers(self._island), place
        )
        self.propagator: Deduplicate = Deduplicate(bred_by, self._history, rng)
        self._history.add_evaluations(known)

    def claim(self, individual: Individual, propulator: Any) -> Assignment | None:
        """Claim an individual that Propulate has bred, or if the run knows it, another one; None at the end."""
        attributes = {
            "island": self._island,
            "worker": self._worker,
            "generation": int(individual.generation),
            "propagator": self._propagator_name,
            "seed": self._seed,
            "immigrants": self._count_immigrants(propulator),
        }
        params = self._space.decode(individual)
        while True:
            with suppress(DuplicateError):
                return self._recorder.claim(params, **attributes)
            params = self._space.decode(self.propagator(propulator.population))
            if self._history.is_known(params):  # there is nothing new to breed
                return self._recorder.claim_waiting(**attributes)

    def _count_immigrants(self, propulator: Any) -> dict[str, int]:
        """Return how many individuals of other islands live on this one, by the island that bred them."""
        own = self._island
        islands = Counter([one.island for one in propulator.population if one.island != own and one.active])
        return {str(island): count for island, count in islands.items()}


def _restore_population(propulator: Any, islands: Archipelago, past: Sequence[Evaluation], island: int) -> None:
    """Put finished evaluations back as individuals, the same on all workers of an island, and continue generations.

    With fewer islands or workers than before, the individuals of those that are gone are dealt to those that are left.
    Each worker's generations are numbered anew, so that island, worker and generation still identify an individual, as
    Propulate needs.
    """
    space, layout = islands.space, islands.layout
    size = layout.count_island_workers(island)
    limits, generations = space.list_gene_limits(), [0] * size
    for evaluation in past:
        if not evaluation.is_finished or evaluation.island % layout.islands != island:
            continue
        if evaluation.inherits is not None and not islands.uses_pbt:
            continue  # Its loss does not compare with those of evaluations without a parent.
        place = (evaluation.worker - layout.find_first_worker(island)) % size
        individual = Individual(dict(space.encode(evaluation.params)), limits)
        individual.loss = evaluation.loss
        individual.costs = islands.objectives.compute_costs(evaluation.values)
        individual.generation = generations[place]
        individual.rank = individual.current = place
        individual.island = island
        individual.migration_steps = 0
        individual.migration_history = str(island)
        individual.evalperiod = evaluation.seconds
        propulator.population.append(individual)
        generations[place] += 1
    propulator.generation = generations[propulator.island_comm.rank]
