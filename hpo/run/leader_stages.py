"""A leader's part in a run: it breeds individuals, claims them, and records their evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from hpo.breeding.islands import Archipelago
from hpo.evaluation.checkpointer import Checkpointer
from hpo.evaluation.elastic import ElasticController
from hpo.evaluation.evaluator import Evaluator
from hpo.evaluation.leader import Leader
from hpo.evaluation.limits import Limits
from hpo.evaluation.trainer_slot import TrainerSlot
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.helper_matching import HelperMatching
from hpo.ranks.rank_watch import RankWatch
from hpo.run.rank_state import RunContext
from hpo.script_objective import Script
from hpo.space import SearchSpace
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX
from hpo.store.study_client import StudyClient, WriterConnection

MakeEvaluator = Callable[[Leader, "ElasticController | None"], Evaluator]


class LeaderStages:
    """A leader's part in the stages of a run, each to be gone through by all leaders together.

    `leaders` is their communicator, in which a leader's rank is the number of its worker. `make_evaluator` returns what
    evaluates individuals with this worker's other ranks.
    """

    def __init__(
        self,
        run: RunContext,
        watch: RankWatch,
        leaders: SleepingComm,
        slot: TrainerSlot,
        make_evaluator: MakeEvaluator,
    ) -> None:
        self._options = run.options
        self._manifest = run.manifest
        self._files = run.files
        self._watch = watch
        self._leaders = leaders
        self._slot = slot
        self._make_evaluator = make_evaluator
        self._timeout = run.options.evaluation_timeout or math.inf

    def search(self, line: WriterConnection, space: SearchSpace, script: Script | None) -> None:
        """Breed, claim and evaluate individuals until the search is over."""
        options, run = self._options, self._manifest
        recorder = self._make_recorder(line)
        prunes, first = run.pruner != "none", script.first_report if script else 1
        limits = Limits(self._timeout, options.max_failures or None, options.target, prunes, first)
        saver = Checkpointer(
            CheckpointStore(self._files.checkpoints), options.checkpoint_every, run.layout.islands if run.pbt else 0
        )
        keeper = WeightsSaver(recorder, run.settings)
        leader = Leader(recorder, self._slot, limits, self._watch.stop_run, keeper, saver)
        exchange = (options.migration_probability, options.pollination)
        islands = Archipelago(space, run.layout, run.propagators, *exchange, run.seed, run.objectives, run.pbt)
        growing = self._make_elastic(recorder)
        islands.evolve(self._leaders, recorder, self._make_evaluator(leader, growing))
        if growing:
            growing.close()

    def confirm(self, line: WriterConnection) -> None:
        """Evaluate what waits in the record, until nothing does."""
        recorder = self._make_recorder(line)
        saver = Checkpointer(
            CheckpointStore(self._files.checkpoints, CONFIRMATION_PREFIX), self._options.checkpoint_every
        )
        keeper = WeightsSaver(recorder, self._manifest.settings)
        leader = Leader(recorder, self._slot, Limits(self._timeout), self._watch.stop_run, keeper, saver)
        growing = self._make_elastic(recorder)
        evaluate = self._make_evaluator(leader, growing)
        worker = self._leaders.rank
        claim = partial(recorder.claim_waiting, island=self._manifest.layout.find_island(worker), worker=worker)
        self._leaders.barrier()  # the first rank has to show progress before an evaluation ends
        while evaluate(claim) is not None:
            pass
        recorder.flush()
        self._leaders.barrier()
        if growing:
            growing.close()

    def _make_recorder(self, line: WriterConnection) -> StudyClient:
        return StudyClient(line, self._manifest.objectives, self._is_stopping)

    def _make_elastic(self, recorder: StudyClient) -> ElasticController | None:
        """Return what lets workers help each other, if the run asks for it."""
        if not self._options.elastic:
            return None
        return ElasticController(HelperMatching(self._leaders.copy(), self._is_stopping), recorder)

    def _is_stopping(self) -> bool:
        return self._watch.active_stop is not None
