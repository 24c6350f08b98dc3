"""The stages of a run: search, confirmation, conclusion. All ranks go through them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hpo.evaluation.evaluator import EvaluationContext, Evaluator
from hpo.evaluation.limits import make_target_stop
from hpo.evaluation.program_command import Program
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.worker_groups import WorkerGroups
from hpo.ranks.agreement import run_on_root
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job
from hpo.run.rank_state import RankState, RunContext
from hpo.run.writer_connection import connect_writer
from hpo.store.evaluations import CONFIRMATION_PREFIX

if TYPE_CHECKING:
    from hpo.evaluation.elastic import ElasticController
    from hpo.evaluation.leader import Leader
    from hpo.ranks.rpc import RpcClient
    from hpo.run.leader_stages import LeaderStages
    from hpo.run.root_rank import RootRank
    from hpo.store.study_writer import StudyWriter


class RunStages:
    """The stages of a run, each to be gone through by all ranks of the job together.

    `leaders` is the communicator of the workers' leaders, None on other ranks; `first` is None on all ranks but the
    job's first.
    """

    def __init__(
        self,
        run: RunContext,
        job: Job,
        ready: RankState,
        group: RankGroup,
        leaders: SleepingComm | None,
        first: RootRank | None,
    ) -> None:
        self._job = job
        self._options = run.options
        self._manifest = run.manifest
        self._files = run.files
        self._ready = ready
        self._group = group
        self._first = first
        self._teams = (
            WorkerGroups(group, ready.host, job.world, run.manifest.layout, self._join_group)
            if run.options.elastic
            else None
        )
        self._program = Program.from_problem(ready.problem)
        self._name_prefix = ""  # of the names of evaluations
        self._leading: LeaderStages | None = None
        self._join_group(group)
        if leaders is not None:
            from hpo.run.leader_stages import LeaderStages  # needs Propulate and numpy

            self._leading = LeaderStages(run, job.watch, leaders, ready.slot, self._make_evaluator)

    def search(self) -> None:
        """Search until the budget is spent or the target reached, unless one of them is so already."""
        first, leading = self._first, self._leading
        if run_on_root(self._job.world, lambda: first.is_search_over() if first else None):
            return
        self._ready.slot.fork_ahead()
        with self._connect_writer(first.make_search_writer if first else None, self._manifest.budget) as line:
            if leading:
                leading.search(line, self._ready.problem.space, self._ready.problem.file.script)
            else:
                self._follow_leader()
        self._share_stop_request()

    def confirm(self) -> None:
        """Train the best again with other seeds, if that is asked for and the search is at its end."""
        self._job.watch.cancel_stop(make_target_stop(self._options.target))  # it ends the search alone
        first, leading = self._first, self._leading
        if not self._manifest.confirm_seeds:
            return
        total = run_on_root(self._job.world, lambda: first.begin_confirmations() if first else 0)
        if not total:
            return
        self._name_prefix = CONFIRMATION_PREFIX
        with self._connect_writer(partial(first.make_confirmations_writer, total) if first else None, total) as line:
            if leading:
                leading.confirm(line)
            else:
                self._follow_leader()
        self._share_stop_request()

    def conclude(self) -> int:
        """Sum the run up, and return the exit status."""
        return int(self._job.world.bcast(self._first.conclude() if self._first else None))

    @contextmanager
    def _connect_writer(self, make_writer: Callable[[], StudyWriter] | None, budget: int) -> Iterator[RpcClient]:
        """Yield this rank's line to the writer of a record; the first rank shows its progress."""
        with connect_writer(self._job, make_writer) as (line, writer), ExitStack() as held:
            if self._first and writer:
                held.enter_context(self._first.show_progress(writer, budget))
            yield line

    def _follow_leader(self) -> None:
        """Evaluate what this worker's leader claims, until there is nothing more."""
        evaluate = self._make_evaluator()
        while evaluate(None) is not None:
            pass

    def _make_evaluator(self, leader: Leader | None = None, growing: ElasticController | None = None) -> Evaluator:
        terms = EvaluationContext(
            self._ready.user_frames,
            self._manifest.seed,
            self._files.trial_folders,
            self._name_prefix,
            self._program,
            self._files.checkpoints,
            keeps_checkpoints=self._options.checkpoint_every != math.inf,
        )
        return Evaluator(terms, self._group, self._job.watch, leader, self._teams, growing)

    def _join_group(self, group: RankGroup) -> None:
        self._job.watch.join_worker(group.own_comm, group.index, group.patience)

    def _share_stop_request(self) -> None:
        """Let all ranks know why the run stops: who heard it may have ended it before its message came to others."""
        for stop in self._job.world.allgather(self._job.watch.active_stop):
            if stop is not None:
                self._job.watch.stop_run(stop)
