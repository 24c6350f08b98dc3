"""The stages of a run on a leader: search and confirmation.

A leader breeds individuals, and records their evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hpo.breeding.islands import IslandWorker
from hpo.evaluation.checkpointer import Checkpointer
from hpo.evaluation.evaluator import Evaluator
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.rank_watch import RankWatch
from hpo.script_objective import Script
from hpo.space import SearchSpace
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX
from hpo.store.study_client import StudyClient, WriterConnection

if TYPE_CHECKING:
    from hpo.run.run_search import RunContext

MakeEvaluator = Callable[[Leader], Evaluator]


class LeaderStages:
    """The stages of a run on a leader. Collective: call each method on all leaders.

    Args:
        run: The options, the manifest and the directory of the run.
        watch: Knows whether the run is being stopped.
        leaders: The communicator of all leaders. The rank of a leader in it is the index of its
            worker.
        make_evaluator: A function that returns an evaluator, which runs evaluations on all ranks of
            this worker.
    """

    def __init__(
        self,
        run: RunContext,
        watch: RankWatch,
        leaders: SleepingComm,
        make_evaluator: MakeEvaluator,
    ) -> None:
        self._options = run.options
        self._manifest = run.manifest
        self._files = run.files
        self._watch = watch
        self._leaders = leaders
        self._make_evaluator = make_evaluator
        self._timeout = run.options.evaluation_timeout

    def search(
        self, connection: WriterConnection, space: SearchSpace, script: Script | None
    ) -> None:
        """Breed individuals, claim them (reserve them in the study), and evaluate them until the search is over.

        Args:
            connection: Connection to the writer of the study, which runs on the first rank.
            script: The program that is the objective; None if the objective is a function.
        """
        options, run = self._options, self._manifest
        study = self._make_study_client(connection)
        prunes, first = run.pruner != "none", script.first_report if script else 1
        limits = Limits(
            self._timeout, options.max_failures or None, options.target_loss, prunes, first
        )
        checkpointer = Checkpointer(
            CheckpointStore(self._files.checkpoints),
            options.checkpoint_every,
            run.layout.islands if run.pbt else 0,
        )
        weights_saver = WeightsSaver(study, run.settings)
        leader = Leader(study, limits, self._watch.stop_run, checkpointer, weights_saver)
        worker = IslandWorker(
            self._leaders,
            study,
            space,
            run.layout,
            propagators=run.propagators,
            migration_probability=options.migration_probability,
            pollination=options.pollination,
            seed=run.seed,
            uses_pbt=run.pbt,
            time_limit=math.inf if options.time_limit is None else options.time_limit,
            budget=run.budget,
        )
        evaluator = self._make_evaluator(leader)
        worker.run(evaluator.evaluate)
        evaluator.end()

    def confirm(self, connection: WriterConnection) -> None:
        """Run all confirmations that the study has enqueued.

        Args:
            connection: Connection to the writer of the study of confirmations.
        """
        study = self._make_study_client(connection)
        checkpointer = Checkpointer(
            CheckpointStore(self._files.checkpoints, CONFIRMATION_PREFIX),
            self._options.checkpoint_every,
        )
        weights_saver = WeightsSaver(study, self._manifest.settings)
        leader = Leader(
            study, Limits(self._timeout), self._watch.stop_run, checkpointer, weights_saver
        )
        evaluator = self._make_evaluator(leader)
        worker = self._leaders.rank
        claim = partial(
            study.claim_waiting, island=self._manifest.layout.find_island(worker), worker=worker
        )
        self._leaders.barrier()  # The first rank must show progress before an evaluation ends.
        while (assignment := claim()) is not None:
            if evaluator.evaluate(assignment).is_stopped:
                break
        evaluator.end()
        study.writer.commit()
        self._leaders.barrier()

    def _make_study_client(self, connection: WriterConnection) -> StudyClient:
        return StudyClient(connection, self._manifest.objectives, self._is_stopping)

    def _is_stopping(self) -> bool:
        return self._watch.active_stop is not None
