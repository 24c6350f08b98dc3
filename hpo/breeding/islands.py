"""Run the islands on the leaders: each leader breeds, claims and evaluates individuals in turn."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpo.breeding.evaluation_history import ParentPool, RecordedHistory, TimeBudget
from hpo.breeding.population import Individual
from hpo.breeding.propagators import make_propagator
from hpo.breeding.propulate_compat import Exchange
from hpo.errors import DuplicateError
from hpo.layout import Layout
from hpo.options import Options
from hpo.ranks.communicator import SleepingComm
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.evaluation.attempt import Attempt
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.study_client import StudyClient


class IslandWorker:
    """One worker of an island: breeds, claims and evaluates individuals on its leader.

    Collective: construct it, and call its method, on all leaders. The rank of a leader in their
    communicator is the index of its worker. Island i uses propagator i modulo their number.
    """

    def __init__(
        self,
        leaders: SleepingComm,
        client: StudyClient,
        space: SearchSpace,
        layout: Layout,
        options: Options,
    ) -> None:
        self._leaders = leaders
        self._client = client
        self._space = space
        self._layout = layout
        self._options = options
        self._worker = leaders.rank
        self._importing: threading.Thread | None = None
        self._island = layout.find_island(self._worker)
        recorded = client.read_changes()
        pool = ParentPool(space, self._island, layout.islands, options.pbt)
        self._history = RecordedHistory(
            space, client.objectives, self._read_changes, client.is_stopping, pool
        )
        self._history.restore(recorded)
        if options.time_limit is not None:
            counted = sum(evaluation.counts_for_budget for evaluation in recorded)
            self._history.time_budget = TimeBudget(
                options.time_limit,
                options.evaluations - counted,
                time.monotonic(),
                ended_before=self._history.ended_count,
            )
        rank = self._find_rank(self._worker)
        self._propagator_name = options.propagators[self._island % len(options.propagators)]
        self._propagator = make_propagator(
            self._propagator_name,
            space,
            f"{options.seed}/{self._worker}/{len(recorded)}",
            self._history,
            workers=layout.count_island_workers(self._island),
            worker=rank,
        )
        self._exchange = Exchange(
            leaders,
            layout,
            self._propagator.rng,
            migration_probability=options.migration_probability,
            pollination=options.pollination,
            is_multi_objective=client.objectives.is_multi_objective,
        )
        self._propagator.population = self._exchange.population
        for evaluation in recorded:
            self._add_to_population(evaluation)
        self._generation = sum(member.rank == rank for member in self._exchange.population)

    def run(self, evaluate: Callable[[Assignment], Attempt]) -> None:
        """Breed, claim and evaluate individuals until nothing is left to claim, or the run stops.

        All leaders return at the same time, after all results have been written to disk.
        """
        self._leaders.barrier()
        while True:
            individual = self._propagator.ask()
            try:
                assignment = self._claim(individual)
            except DuplicateError:  # Another worker has claimed the same since the last update.
                self._history.update()
                continue
            if assignment is None:
                break
            attempt = evaluate(assignment)
            if attempt.is_stopped:
                break
            self._history.update()
            if assignment.tests is None:  # Otherwise, the evaluation has only tested this worker.
                self._generation += 1
                self._exchange.migrate()
        if self._importing is not None:
            # At the end of a run, the main thread imports some of the same modules. Two threads
            # that do this at the same time may get modules that are not complete.
            self._importing.join()
        self._leaders.drop_messages()
        self._exchange.close()
        self._client.call.commit()
        self._leaders.barrier()

    def _claim(self, individual: Individual) -> Assignment | None:
        """Claim an evaluation: of the individual, or one that waits or was paused.

        Return None if nothing is left to claim. Raise a DuplicateError if the run has an evaluation
        of the individual already.
        """
        attributes = {
            "island": self._island,
            "worker": self._worker,
            "generation": self._generation,
            "propagator": self._propagator_name,
            "seed": self._options.seed,
            "immigrants": self._exchange.count_immigrants(),
        }
        if self._history.is_known(individual.params):  # Nothing new is left.
            return self._client.claim(None, **attributes)
        assignment = self._client.claim(individual.params, **attributes)
        name = "hpo.breeding.surrogate"
        if self._propagator_name == "ga" and name not in sys.modules:
            # The import takes seconds, while trainers start the evaluation.
            self._importing = threading.Thread(
                target=importlib.import_module, args=[name], daemon=True
            )
            self._importing.start()
        return assignment

    def _read_changes(self) -> list[Evaluation]:
        """Return what has changed in the study since the previous call, for the history."""
        changes = self._client.read_changes()
        for evaluation in changes:
            self._add_to_population(evaluation)
        return changes

    def _add_to_population(self, evaluation: Evaluation) -> None:
        """Add the individual of an evaluation to the population if it has finished on the island.

        If the run had more islands or workers before, the individuals of those that were removed
        are distributed to the remaining ones.
        """
        is_own = evaluation.island % self._layout.islands == self._island
        # The loss of an heir cannot be compared with losses of founders.
        is_comparable = evaluation.inherits is None or self._options.pbt
        if evaluation.is_finished and is_own and is_comparable:
            individual = Individual(self._space, self._space.encode(evaluation.params))
            individual.trial = evaluation.trial
            individual.island = self._island
            individual.rank = individual.current = self._find_rank(evaluation.worker)
            self._propagator.tell(individual, *evaluation.values)

    def _find_rank(self, worker: int) -> int:
        """Return the index of a worker on the island."""
        first = self._layout.find_first_worker(self._island)
        return (worker - first) % self._layout.count_island_workers(self._island)
