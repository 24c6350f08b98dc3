"""Run a search: what all ranks do, from the options to the exit status.

`hpo.run.leader_stages` has what only leaders do, and `hpo.run.first_rank` what only the first rank
does.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hpo.evaluation.attempt import EvaluationContext
from hpo.evaluation.evaluator import Evaluator
from hpo.evaluation.leader import make_target_stop
from hpo.evaluation.program import Program
from hpo.evaluation.rank_group import RankGroup
from hpo.layout import Layout
from hpo.options import Options
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job, abort_for_error, run_on_all, run_on_root
from hpo.ranks.rank_watch import RankWatch
from hpo.ranks.rpc import RpcClient, RpcServer
from hpo.run.prepare_rank import RankState, prepare_rank
from hpo.store.evaluations import CONFIRMATION_PREFIX
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.text_format import format_duration

if TYPE_CHECKING:
    from hpo.evaluation.leader import Leader
    from hpo.run.first_rank import FirstRank
    from hpo.store.study_writer import StudyWriter

_SECONDS_BEFORE_JOB_ENDS = 60.0


def run_search(options: Options, layout: Layout, job: Job) -> int:
    """Run a search to its end, and return the exit status. Collective: call on all ranks.

    Raises UsageError on all ranks if an option, a setting or the search file is not valid.
    """
    world = job.world
    index = layout.find_worker(world.rank)
    leads = world.rank == layout.list_ranks(index)[0]
    if leads:
        # Imports Propulate while the template imports torch.
        from hpo.run import leader_stages  # noqa: F401
    if job.is_first:
        from hpo.run import first_rank  # noqa: F401 - imports Optuna as well

        _limit_time(options, job.watch)
        print(f"loading {options.search_space.name}", flush=True)
    with prepare_rank(options, layout, job, shows_progress=True) as state, ExitStack() as resources:
        first = _begin_session(options, job, state, resources)
        manifest, run_dir = world.bcast(
            (first.session.manifest, first.session.run_dir) if first else None
        )
        comm = world.split(index, world.rank)
        group = resources.enter_context(
            RankGroup(comm, state.place, index, options.collective_timeout, state.slot)
        )
        leaders = world.split(int(leads), index)
        rank = SearchRank(
            options, job, state, manifest, run_dir, group, leaders if leads else None, first
        )
        job.watch.join_worker(group.comm, group.index, group.patience)
        rank.search()
        rank.confirm()
        return rank.conclude()


def _begin_session(
    options: Options, job: Job, state: RankState, resources: ExitStack
) -> FirstRank | None:
    """Begin this session of the run, and return the tasks of the first rank; None on other ranks.

    The run directory is locked until `resources` is closed. Collective: call on all ranks.
    """
    places = job.world.allgather(state.place)

    def begin() -> FirstRank | None:
        if state.request is None:
            return None
        from hpo.run.first_rank import FirstRank
        from hpo.run.session import begin_session, enter_run_dir
        from hpo.store.storage import cache_journals

        resources.enter_context(cache_journals())
        name = state.problem.file.path.stem
        run_dir = enter_run_dir(options.run_dir, name, options.resume, resources)
        session = begin_session(run_dir, state.request, places)
        return FirstRank(options, job, session, state, places)

    return run_on_all(job.world, begin)


@dataclass
class SearchRank:
    """A rank of a search. Collective: call each public method on all ranks of the job."""

    options: Options
    job: Job
    state: RankState
    manifest: Manifest
    run_dir: RunDir
    group: RankGroup
    """The ranks of this worker."""
    leaders: SleepingComm | None
    """The leaders of all workers, in the order of workers; None on other ranks."""
    first: FirstRank | None
    """The tasks of the first rank; None on other ranks."""

    def search(self) -> None:
        """Search until the budget is spent or the target is reached. Skip a search that is over."""
        first = self.first
        if run_on_root(self.job.world, lambda: first.is_search_over() if first else None):
            return
        self.group.fork_ahead()
        make_writer = first.make_search_writer if first else None
        self._run_stage("search", make_writer, self.manifest.budget)

    def confirm(self) -> None:
        """Train the best individuals again with other seeds, for --confirm-seeds."""
        # It ends only the search.
        self.job.watch.cancel_stop(make_target_stop(self.options.target_loss))
        first = self.first
        if not self.manifest.confirm_seeds:
            return
        total = run_on_root(self.job.world, lambda: first.begin_confirmations() if first else 0)
        if not total:
            return
        make_writer = partial(first.make_confirmations_writer, total) if first else None
        self._run_stage("confirm", make_writer, total, CONFIRMATION_PREFIX)

    def conclude(self) -> int:
        """Print and write the outcome of the run, and return the exit status."""
        self.state.slot.end_trainer()  # The test of the best network needs the memory of the GPUs.
        self.job.world.barrier()
        return int(self.job.world.bcast(self.first.conclude() if self.first else None))

    def make_evaluator(self, leader: Leader | None = None, name_prefix: str = "") -> Evaluator:
        """Return the evaluator of this rank. Not collective.

        Args:
            leader: Decides on losses; None on a rank that is not the leader of its worker.
            name_prefix: Prefix of the names of evaluations.
        """
        context = EvaluationContext(
            self.state.user_frames,
            self.manifest.seed,
            self.run_dir,
            name_prefix,
            Program.from_problem(self.state.problem),
            keeps_checkpoints=self.options.checkpoint_every != math.inf,
        )
        return Evaluator(context, self.group, self.job.watch, leader)

    def _run_stage(
        self,
        name: str,
        make_writer: Callable[[], StudyWriter] | None,
        budget: int,
        name_prefix: str = "",
    ) -> None:
        """Run a function of `hpo.run.leader_stages` on the leaders, which other ranks follow.

        The first rank, on which `make_writer` is not None, writes the study and shows the progress.
        """
        with connect_writer(self.job, make_writer) as (client, writer):
            shown = self.first.show_progress(writer, budget) if self.first and writer else None
            with shown or nullcontext():
                if self.leaders is None:
                    self.make_evaluator(name_prefix=name_prefix).follow()
                else:
                    from hpo.run import leader_stages

                    getattr(leader_stages, name)(self, self.leaders, client)
        # A rank may have stopped the run before its message has reached the other ranks.
        for stop in self.job.world.allgather_given(self.job.watch.active_stop):
            self.job.watch.stop_run(stop)


@contextmanager
def connect_writer(
    job: Job, make_writer: Callable[[], StudyWriter] | None
) -> Iterator[tuple[RpcClient, StudyWriter | None]]:
    """Create the writer of a study on the first rank. Collective: call on all ranks.

    When all ranks have left the ``with`` block, the results of all calls in it are on disk.

    `make_writer` returns the writer on the first rank, and is None on other ranks. Yields a client
    of the writer, and the writer itself on the first rank.
    """
    comm = job.world.copy()
    client = RpcClient(comm)
    if make_writer is None:
        yield client, None
    else:
        writer = make_writer()
        on_error = partial(abort_for_error, job.watch)
        with RpcServer(comm, writer.answer, writer.commit_if_due, writer.batch_writes(), on_error):
            yield client, writer
    comm.drop_messages()


def _limit_time(options: Options, watch: RankWatch) -> None:
    """Schedule a stop of the run at its time limit, and before the end of its job."""
    if options.time_limit is not None:
        reason = f"--time-limit {format_duration(options.time_limit)}"
        watch.schedule_stop(options.time_limit, reason)
    _, job_end = find_job_end(os.environ)
    if job_end is not None:
        watch.schedule_stop(job_end - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the job")


def find_job_end(environment: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the variable with the end of this job, and the end since the epoch, or None."""
    for name in ("HPO_JOB_END_TIME", "SLURM_JOB_END_TIME"):
        if job_end := environment.get(name):
            # A time in the past belongs to another job, or to this job before its time limit was
            # extended.
            is_ahead = job_end.isdigit() and int(job_end) > time.time()
            return (name, int(job_end)) if is_ahead else ("", None)
    return "", None
