"""The stages of a run on all ranks: search, confirmation and conclusion."""

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
from hpo.ranks.agreement import run_on_root
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job
from hpo.run.rank_state import RankState, RunContext
from hpo.run.writer_connection import connect_writer
from hpo.store.evaluations import CONFIRMATION_PREFIX

if TYPE_CHECKING:
    from hpo.evaluation.leader import Leader
    from hpo.ranks.rpc import RpcClient
    from hpo.run.leader_stages import LeaderStages
    from hpo.run.root_rank import RootRank
    from hpo.store.study_writer import StudyWriter


class RunStages:
    """The stages of a run. Collective: call each method on all ranks of the job.

    Args:
        run: The options, the manifest (content of run.json) and the directory of the run.
        ready: The data of this rank after the search file is loaded.
        group: The ranks of this worker.
        leaders: The communicator of all leaders; None on other ranks.
        root: The tasks of the first rank; None on other ranks.
    """

    def __init__(
        self,
        run: RunContext,
        job: Job,
        ready: RankState,
        group: RankGroup,
        leaders: SleepingComm | None,
        root: RootRank | None,
    ) -> None:
        self._job = job
        self._options = run.options
        self._manifest = run.manifest
        self._files = run.files
        self._ready = ready
        self._group = group
        self._root = root
        self._program = Program.from_problem(ready.problem)
        self._name_prefix = ""  # prefix of the names of evaluations
        self._leader_stages: LeaderStages | None = None
        job.watch.join_worker(group.comm, group.index, group.patience)
        if leaders is not None:
            from hpo.run.leader_stages import LeaderStages  # imports Propulate and numpy

            self._leader_stages = LeaderStages(run, job.watch, leaders, self._make_evaluator)

    def search(self) -> None:
        """Search until the budget is spent or the target is reached. Return at once if the search is already over."""
        root, leader_stages = self._root, self._leader_stages
        if run_on_root(self._job.world, lambda: root.is_search_over() if root else None):
            return
        self._group.fork_ahead()
        with self._connect_writer(root.make_search_writer if root else None, self._manifest.budget) as connection:
            if leader_stages:
                leader_stages.search(connection, self._ready.problem.space, self._ready.problem.file.script)
            else:
                self._make_evaluator().follow()
        self._share_stop_request()

    def confirm(self) -> None:
        """Train the best individuals again with other seeds, if ``--confirm-seeds`` is given and the search is over."""
        self._job.watch.cancel_stop(make_target_stop(self._options.target_loss))  # It ends only the search.
        root, leader_stages = self._root, self._leader_stages
        if not self._manifest.confirm_seeds:
            return
        total = run_on_root(self._job.world, lambda: root.begin_confirmations() if root else 0)
        if not total:
            return
        self._name_prefix = CONFIRMATION_PREFIX
        make_writer = partial(root.make_confirmations_writer, total) if root else None
        with self._connect_writer(make_writer, total) as connection:
            if leader_stages:
                leader_stages.confirm(connection)
            else:
                self._make_evaluator().follow()
        self._share_stop_request()

    def conclude(self) -> int:
        """Print and write the outcome of the run, and return the exit status."""
        self._ready.slot.end_trainer()  # The test of the best network needs the memory of the GPUs.
        self._job.world.barrier()
        return int(self._job.world.bcast(self._root.conclude() if self._root else None))

    @contextmanager
    def _connect_writer(self, make_writer: Callable[[], StudyWriter] | None, budget: int) -> Iterator[RpcClient]:
        with connect_writer(self._job, make_writer) as (connection, writer), ExitStack() as resources:
            if self._root and writer:
                resources.enter_context(self._root.show_progress(writer, budget))
            yield connection

    def _make_evaluator(self, leader: Leader | None = None) -> Evaluator:
        context = EvaluationContext(
            self._ready.user_frames,
            self._manifest.seed,
            self._files.trial_folders,
            self._name_prefix,
            self._program,
            self._files.checkpoints,
            keeps_checkpoints=self._options.checkpoint_every != math.inf,
        )
        return Evaluator(context, self._group, self._job.watch, leader)

    def _share_stop_request(self) -> None:
        # A rank may have stopped the run before its message has reached the other ranks.
        for stop in self._job.world.allgather(self._job.watch.active_stop):
            if stop is not None:
                self._job.watch.stop_run(stop)
