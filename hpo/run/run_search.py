"""Run a search: what all ranks do, from the options to the exit status."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hpo.evaluation.evaluator import EvaluationContext, Evaluator
from hpo.evaluation.leader import make_target_stop
from hpo.evaluation.program_command import Program
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
    from hpo.evaluation.host import RankPlace
    from hpo.evaluation.leader import Leader
    from hpo.run.first_rank import FirstRank
    from hpo.run.leader_stages import LeaderStages
    from hpo.store.study_writer import StudyWriter

_SECONDS_BEFORE_JOB_ENDS = 60.0


@dataclass(frozen=True)
class RunContext:
    """The data of a run that all ranks have: the options, the manifest and the run directory."""

    options: Options
    manifest: Manifest
    files: RunDir


def run_search(options: Options, layout: Layout, job: Job) -> int:
    """Run a search to its end. Collective: call on all ranks.

    Args:
        layout: The layout of all ranks of the job.

    Returns:
        The exit status.

    Raises:
        UsageError: An option, a setting or the search file is not valid. The error is raised on all
            ranks, before the run starts.
    """
    world = job.world
    index, patience = layout.find_worker(world.rank), options.collective_timeout
    leads = world.rank == layout.list_ranks(index)[0]
    if leads:
        from hpo.run import leader_stages  # noqa: F401 - imports Propulate while the template imports torch
    if job.is_first:
        from hpo.run import first_rank  # noqa: F401 - imports Optuna as well

        _limit_time(options, job.watch)
        # On a slow machine, the next line may follow a minute later.
        print(f"loading torch and {options.search_space.name}", flush=True)
    with prepare_rank(options, layout, job, shows_progress=True) as ready, ExitStack() as resources:
        places = world.allgather(ready.host.place)
        root = run_on_all(
            world,
            lambda: (
                _begin_session(options, job, ready, places, resources) if job.is_first else None
            ),
        )
        run = RunContext(options, *world.bcast((root.manifest, root.files) if root else None))
        group = resources.enter_context(
            RankGroup(world.split(index, world.rank), ready.host, index, patience, ready.slot)
        )
        leaders = world.split(int(leads), index)
        stages = RunStages(run, job, ready, group, leaders if leads else None, root)
        stages.search()
        stages.confirm()
        return stages.conclude()


def _begin_session(
    options: Options, job: Job, ready: RankState, places: Sequence[RankPlace], resources: ExitStack
) -> FirstRank:
    """Begin this session of the run, on the first rank. The run directory is locked until `resources` is closed."""
    from hpo.run.first_rank import FirstRank
    from hpo.run.session import begin_session, enter_run_dir
    from hpo.store.storage import cache_journals

    assert ready.request is not None
    resources.enter_context(cache_journals())
    run_dir = enter_run_dir(
        options.run_dir, ready.problem.file.path.stem, options.resume, resources
    )
    return FirstRank(options, job, begin_session(run_dir, ready.request, places), ready, places)


class RunStages:
    """The stages of a run. Collective: call each method on all ranks of the job.

    Args:
        run: The options, the manifest and the directory of the run.
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
        root: FirstRank | None,
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
        with self._connect_writer(
            root.make_search_writer if root else None, self._manifest.budget
        ) as connection:
            if leader_stages:
                leader_stages.search(
                    connection, self._ready.problem.space, self._ready.problem.file.script
                )
            else:
                self._make_evaluator().follow()
        self._share_stop_request()

    def confirm(self) -> None:
        """Train the best individuals again with other seeds, if ``--confirm-seeds`` is given and the search is over."""
        # It ends only the search.
        self._job.watch.cancel_stop(make_target_stop(self._options.target_loss))
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
    def _connect_writer(
        self, make_writer: Callable[[], StudyWriter] | None, budget: int
    ) -> Iterator[RpcClient]:
        with (
            connect_writer(self._job, make_writer) as (connection, writer),
            ExitStack() as resources,
        ):
            if self._root and writer:
                resources.enter_context(self._root.show_progress(writer, budget))
            yield connection

    def _make_evaluator(self, leader: Leader | None = None) -> Evaluator:
        context = EvaluationContext(
            self._ready.user_frames,
            self._manifest.seed,
            self._files,
            self._name_prefix,
            self._program,
            keeps_checkpoints=self._options.checkpoint_every != math.inf,
        )
        return Evaluator(context, self._group, self._job.watch, leader)

    def _share_stop_request(self) -> None:
        # A rank may have stopped the run before its message has reached the other ranks.
        for stop in self._job.world.allgather(self._job.watch.active_stop):
            if stop is not None:
                self._job.watch.stop_run(stop)


@contextmanager
def connect_writer(
    job: Job, make_writer: Callable[[], StudyWriter] | None
) -> Iterator[tuple[RpcClient, StudyWriter | None]]:
    """Create the writer of a study on the first rank, and yield a connection to it. Collective: call on all ranks.

    When all ranks have left the ``with`` block, the results of all calls in it are on disk.

    Args:
        make_writer: A function that returns the writer, on the first rank; None on other ranks.

    Yields:
        The connection to the writer; and the writer itself on the first rank, None on other ranks.
    """
    comm = job.world.copy()
    client = RpcClient(comm)
    if make_writer is not None:
        writer, watch = make_writer(), job.watch
        server = RpcServer(
            comm,
            writer,
            writer.commit_if_due,
            writer.batch_writes(),
            partial(abort_for_error, watch),
        )
        with server:
            yield client, writer
    else:
        yield client, None
    comm.drop_messages()


def _limit_time(options: Options, watch: RankWatch) -> None:
    """Schedule a stop of the run at its time limit, and before the end of its job."""
    if options.time_limit is not None:
        watch.schedule_stop(
            options.time_limit, f"--time-limit {format_duration(options.time_limit)}"
        )
    _, job_end = find_job_end(os.environ)
    if job_end is not None:
        watch.schedule_stop(job_end - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the job")


def find_job_end(environment: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the environment variable with the end of this job, and the end in seconds since the epoch.

    Return ("", None) if no variable has it.
    """
    for name in ("HPO_JOB_END_TIME", "SLURM_JOB_END_TIME"):
        if job_end := environment.get(name):
            # A time in the past belongs to another job, or to this job before its time limit was
            # extended.
            return (
                (name, int(job_end))
                if job_end.isdigit() and int(job_end) > time.time()
                else ("", None)
            )
    return "", None
