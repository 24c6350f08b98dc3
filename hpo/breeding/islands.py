"""Run the islands of Propulate on the leaders.

An island begins with the evaluations that the study already has, and breeds until the budget is spent.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.parent_pool import ParentPool
from hpo.breeding.propagators import Deduplicate, make_propagator
from hpo.breeding.propulate_compat import Individual, Migrator, Pollinator
from hpo.breeding.time_budget import TimeBudget
from hpo.errors import DuplicateError
from hpo.layout import Layout
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.ranks.communicator import SleepingComm
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.breeding.propagators import Deduplicate
    from hpo.evaluation.evaluator import Evaluated
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.study_client import StudyClient


class _BudgetSpent(Exception):  # noqa: N818 - not an error
    """Raised when the budget is spent. Otherwise, the loop of Propulate would not end."""


@dataclass(frozen=True)
class Archipelago:
    """The islands of a run: how they breed, and how they exchange individuals."""

    space: SearchSpace
    layout: Layout
    propagators: Sequence[str]
    """The names of the propagators. Island i uses propagator i modulo their number."""
    migration_probability: float = 0.9
    """The expected number of migrations from an island while each of its workers breeds one generation."""
    pollination: bool = True
    """Whether islands send copies of individuals to each other. Otherwise, individuals move between islands."""
    seed: int = 0
    objectives: Objectives = ONLY_LOSS
    uses_pbt: bool = False
    """Whether an evaluation may start from the checkpoint of one of the best evaluations of its island."""
    time_limit: float = math.inf
    """The time limit of this session (one start of the run) in seconds."""
    budget: int = 0
    """The number of evaluations of the whole run. It is used only with a time limit."""

    def evolve(self, leaders: SleepingComm, client: StudyClient, evaluate: Callable[[Assignment], Evaluated]) -> None:
        """Breed individuals, claim them (reserve them in the study), and evaluate them until nothing is left to claim.

        First, evaluations that the study already has become individuals of their islands. All
        leaders return at the same time, after all results have been written to disk. Collective:
        call on all leaders.

        Args:
            leaders: The communicator of all leaders. The rank of a leader is the index of its worker.
            client: Reads and changes the study.
            evaluate: A function that evaluates a claimed individual on this worker.
        """
        worker = leaders.rank
        island = self.layout.find_island(worker)
        recorded = client.read_changes()
        rng = random.Random(f"{self.seed}/{worker}/{len(recorded)}")
        breeder = Breeder(self, worker, client, rng, recorded)

        def evaluate_individual(individual: Individual) -> float:
            evaluated = _evaluate_claimed(breeder, individual, propulator.population, evaluate)
            # Replaced individuals no longer breed, but Propulate would search them several times in each generation.
            propulator.population = [member for member in propulator.population if member.active]
            genes = self.space.encode(evaluated.params)
            values = (evaluated.loss, *self.objectives.select_metric_values(evaluated.metrics))
            individual.costs = self.objectives.compute_costs(values)
            for name in evaluated.params:  # Inactive parameters keep their genes, which can be inherited.
                individual[name] = genes[name]
            return evaluated.loss

        propulator = self._join_island(leaders, island, evaluate_individual, breeder.propagator, rng)
        _restore_population(propulator, self, recorded, island)
        leaders.barrier()
        with suppress(_BudgetSpent):
            propulator.propulate(logging_interval=1000, debug=0)
        leaders.drop_messages()
        propulator.island_comm.drop_messages()
        client.writer.commit()
        leaders.barrier()

    def _join_island(
        self,
        leaders: SleepingComm,
        island: int,
        evaluate_individual: Callable[[Individual], float],
        propagator: Deduplicate,
        rng: random.Random,
    ) -> Any:
        """Return the object of Propulate that breeds on this leader.

        It exchanges individuals with other leaders, and does not write checkpoints.
        """
        sizes = [self.layout.count_island_workers(each) for each in range(self.layout.islands)]
        kind = Pollinator if self.pollination else Migrator
        # Propulate unpickles files in its checkpoint path. A new folder has none.
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
        # Propulate calls this six times in each generation, five times for its log. The propagator and
        # `evaluate_individual` already drop inactive individuals.
        propulator._get_active_individuals = lambda: (propulator.population, len(propulator.population))
        return propulator

    def _make_exchange_options(self, rng: random.Random) -> dict[str, Any]:
        """Return Propulate's options to select emigrants and replaced individuals; {} for one objective."""
        if not self.objectives.is_multi_objective:
            return {}
        from hpo.breeding.selection import EmigrantSelection, ReplacementSelection

        replaced = {"immigration_propagator": ReplacementSelection} if self.pollination else {}
        return {"emigration_propagator": partial(EmigrantSelection, rng=rng), **replaced}


class Breeder:
    """Breeds individuals on the leader of a worker, and claims them (reserves them in the study).

    Args:
        client: Reads and changes the study.
        rng: The random number generator.
        known: The evaluations that the study already has.
    """

    def __init__(
        self,
        archipelago: Archipelago,
        worker: int,
        client: StudyClient,
        rng: random.Random,
        known: Sequence[Evaluation],
    ) -> None:
        layout = archipelago.layout
        self._space = archipelago.space
        self._worker = worker
        self._island = layout.find_island(worker)
        self._seed = archipelago.seed
        self._propagator_name = archipelago.propagators[self._island % len(archipelago.propagators)]
        self._client = client
        remaining = archipelago.budget - sum(evaluation.counts_for_budget for evaluation in known)
        self._time_budget = TimeBudget(archipelago.time_limit, remaining, time.monotonic())
        self._ended_before = 0
        parent_pool = ParentPool(archipelago.space, self._island, layout.islands, archipelago.uses_pbt)
        self._history = EvaluationHistory(
            archipelago.space,
            client.read_changes,
            archipelago.objectives,
            client.is_stopping,
            parent_pool,
            self._compute_scarcity,
        )
        index = worker - layout.find_first_worker(self._island)
        propagator = make_propagator(
            self._propagator_name, self._history, rng, layout.count_island_workers(self._island), index
        )
        self.propagator: Deduplicate = Deduplicate(propagator, self._history, rng)
        # Models depend on the order of ends, which a resumed run must not change.
        self._history.add_evaluations(sorted(known, key=lambda e: (e.ended if e.has_ended else math.inf, e.trial)))
        self._ended_before = self._history.ended_count

    def _compute_scarcity(self, ended: int) -> float:
        """Return how scarce time is after `ended` evaluations of this session and all earlier ones."""
        return self._time_budget.compute_scarcity(ended - self._ended_before)

    def claim(self, individual: Individual, population: list[Individual]) -> Assignment | None:
        """Claim an individual. If the run already has an evaluation of it, breed and claim a new individual instead.

        Args:
            individual: The individual that Propulate has bred.
            population: The population of the island.

        Returns:
            The claimed evaluation; None if nothing is left to claim.
        """
        attributes = {
            "island": self._island,
            "worker": self._worker,
            "generation": int(individual.generation),
            "propagator": self._propagator_name,
            "seed": self._seed,
            "immigrants": self._count_immigrants(population),
        }
        params = self._space.decode(individual)
        while True:
            with suppress(DuplicateError):
                assignment = self._client.claim(params, **attributes)
                self._import_surrogate()
                return assignment
            params = self._space.decode(self.propagator(population))
            if self._history.is_known(params):  # Nothing new is left.
                return self._client.claim_waiting(**attributes)

    def _import_surrogate(self) -> None:
        """Import the surrogate while the trainers of this worker run their first evaluation: it takes seconds."""
        if self._propagator_name == "ga" and "hpo.breeding.surrogate" not in sys.modules:
            threading.Thread(target=importlib.import_module, args=["hpo.breeding.surrogate"], daemon=True).start()

    def _count_immigrants(self, population: list[Individual]) -> dict[str, int]:
        """Return the number of immigrants in the population, by the index of the island that bred them.

        Inactive individuals, which were replaced, are not counted.
        """
        own = self._island
        islands = Counter([i.island for i in population if i.island != own and i.active])
        return {str(island): count for island, count in islands.items()}


def _evaluate_claimed(
    breeder: Breeder,
    individual: Individual,
    population: list[Individual],
    evaluate: Callable[[Assignment], Evaluated],
) -> Evaluated:
    """Claim an individual, and evaluate it. Raises _BudgetSpent if nothing is left to claim, or if the run stops."""
    while (assignment := breeder.claim(individual, population)) is not None:
        evaluated = evaluate(assignment)
        if evaluated.is_stopped:
            break
        if assignment.tests is None:  # Otherwise, the evaluation has only tested this worker.
            return evaluated
    raise _BudgetSpent


def _restore_population(propulator: Any, archipelago: Archipelago, recorded: Sequence[Evaluation], island: int) -> None:
    """Add the finished evaluations of an island to its population, and set the next generation of this worker.

    All workers of an island get the same population. If there are fewer islands or workers than before, the individuals
    of removed islands or workers are distributed to the remaining ones. The generations of each worker are numbered
    again from 0, because island, worker and generation must identify an individual.
    """
    space, layout = archipelago.space, archipelago.layout
    size = layout.count_island_workers(island)
    limits, generations = space.list_gene_limits(), [0] * size
    for evaluation in recorded:
        if not evaluation.is_finished or evaluation.island % layout.islands != island:
            continue
        if evaluation.inherits is not None and not archipelago.uses_pbt:
            continue  # Its loss cannot be compared with losses of evaluations without a parent.
        index = (evaluation.worker - layout.find_first_worker(island)) % size
        individual = Individual(dict(space.encode(evaluation.params)), limits)
        individual.loss = evaluation.loss
        individual.costs = archipelago.objectives.compute_costs(evaluation.values)
        individual.generation = generations[index]
        individual.rank = individual.current = index
        individual.island = island
        individual.migration_steps = 0
        individual.migration_history = str(island)
        individual.evalperiod = evaluation.seconds
        propulator.population.append(individual)
        generations[index] += 1
    propulator.generation = generations[propulator.island_comm.rank]
