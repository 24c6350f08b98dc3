"""Run `hpo check-cluster`, which tests a job without a search of the user. All ranks take part.

Trainers measure their process groups by an objective, so the check takes the same way as an evaluation of a search.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from hpo.check.check_evaluator import CheckEvaluator, CheckOutcome
from hpo.check.clock_offsets import measure_clock_offsets
from hpo.check.cluster_facts import ClusterFacts, FolderFacts, FolderView, GroupSpeed, RankFacts
from hpo.check.cluster_findings import judge_cluster
from hpo.check.cluster_printing import print_cluster
from hpo.check.evaluation_findings import has_passed
from hpo.check.printing import print_findings
from hpo.check.run_check import is_stopping, report_stop
from hpo.check.shared_folder import FolderTest, compare_views
from hpo.errors import ExitStatus
from hpo.evaluation.leader import Limits
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.verdict import TIMEOUT_PREFIX
from hpo.layout import Layout, list_usable_cores
from hpo.options import Options
from hpo.process import clock
from hpo.process.launcher import describe_launcher, describe_scheduler
from hpo.process.linux import count_threads_per_core, identify_container
from hpo.ranks.communicator import SleepingComm, describe_mpi
from hpo.ranks.job import Job, run_on_all
from hpo.run.prepare_rank import RankState, prepare_rank
from hpo.run.run_search import find_job_end
from hpo.store.run_dir import RUNS_DIR
from hpo.text_format import format_count

_MEBIBYTES = 25  # size of the gradient buckets of DistributedDataParallel


def run_cluster_check(options: Options, layout: Layout, job: Job) -> int:
    """Check a job, and return status 0 if nothing is wrong, 1 otherwise. Collective: call on all ranks.

    Args:
        options: The options, with the search file that measures process groups.
        job: The MPI job. Its ranks are sorted by host.

    Raises:
        UsageError: The run directory cannot be used. The error is raised on all ranks, before anything is measured.
    """
    with ExitStack() as leftovers:
        if job.is_first:
            job.watch.set_stop_callbacks(lambda: None, partial(_stop_late, leftovers))
        with prepare_rank(options, layout, job) as ready:
            job.watch.join_worker(job.world, 0, options.collective_timeout)
            facts = _collect_facts(options, layout, job, ready, leftovers)
            if is_stopping(job):
                return report_stop(job)
            status: int = ExitStatus.BUDGET_SPENT
            if facts is not None:
                print_cluster(facts)
                findings = judge_cluster(facts)
                print_findings(findings)
                status = ExitStatus.BUDGET_SPENT if has_passed(findings) else ExitStatus.CRASHED
            return int(job.world.bcast(status))


def _stop_late(leftovers: ExitStack) -> int:
    """Remove temporary files before a job that does not stop in time is ended, and return the exit status."""
    leftovers.close()
    return ExitStatus.INTERRUPTED


def _collect_facts(
    options: Options, layout: Layout, job: Job, ready: RankState, leftovers: ExitStack
) -> ClusterFacts | None:
    """Return all facts on the first rank; None on other ranks, and if the job is stopping. Collective."""
    world = job.world
    ranks = world.allgather(_collect_rank_facts(ready))
    hosts = [rank.host for rank in ranks]
    is_head = hosts.index(hosts[world.rank]) == world.rank
    split = world.split(int(is_head), world.rank)
    heads = split if is_head else None
    folder, views = _test_folder(options.run_dir or RUNS_DIR, job, heads, leftovers)
    if job.is_first:
        print(f"{layout}, {format_count(len(set(hosts)), 'host')}", flush=True)
    clocks = measure_clock_offsets(heads) if heads is not None else []
    if is_stopping(job):
        return None
    ready.slot.provide_trainer()  # Otherwise the first trainer would wait until its template has imported the compiler.
    world.barrier()
    meter = _GroupMeter(ready, job, options.collective_timeout)
    speeds = meter.measure_workers(layout)
    # If a worker that spans hosts has failed, the next group would probably fail as late.
    is_network_known = any(speed.failure and len({hosts[rank] for rank in speed.ranks}) > 1 for speed in speeds)
    if is_stopping(job):
        return None
    between = None
    if heads is not None and heads.size > 1 and not is_network_known:
        between = meter.measure(heads, 0)
    if folder is None:
        return None
    return ClusterFacts(
        layout,
        ranks,
        clocks,
        folder,
        views,
        speeds,
        between,
        describe_mpi(),
        describe_launcher(os.environ),
        describe_scheduler(os.environ),
        find_job_end(os.environ)[0],
    )


def _test_folder(
    run_dir: Path, job: Job, heads: SleepingComm | None, leftovers: ExitStack
) -> tuple[FolderFacts | None, list[FolderView]]:
    """Test the folder of a run directory, and return the facts on the first rank. Collective: call on all ranks.

    Args:
        heads: Communicator of one rank of each host; None on other ranks.
        leftovers: Gets a callback that removes the temporary folder, for a stop of the job.
    """
    test = run_on_all(job.world, lambda: FolderTest(run_dir) if job.is_first else None)
    if test is not None:
        leftovers.callback(test.close)
    path = job.world.bcast(test.folder if test is not None else None)
    views = compare_views(heads, path, lambda: job.watch.active_stop is not None) if heads is not None else []
    if test is None:
        return None, views
    test.close()
    return test.facts, views


def _collect_rank_facts(ready: RankState) -> RankFacts:
    return RankFacts(
        host=ready.host.number,
        host_name=socket.gethostname(),
        cores=tuple(list_usable_cores()),
        host_cores=os.cpu_count() or 1,
        threads_per_core=count_threads_per_core(),
        container=identify_container(),
        gpus=ready.host.gpus,
    )


class _GroupMeter:
    """Measures process groups of trainers.

    Args:
        ready: The data of this rank. Its search file measures process groups.
        patience: Maximum seconds for which a rank waits for its peers.
    """

    def __init__(self, ready: RankState, job: Job, patience: float) -> None:
        self._ready = ready
        self._job = job
        self._patience = patience

    def measure_workers(self, layout: Layout) -> list[GroupSpeed]:
        """Measure the process groups of all workers at the same time. Collective: call on all ranks of the job."""
        world = self._job.world
        index = layout.find_worker(world.rank)
        measured = world.allgather(self.measure(world.split(index, world.rank), index))
        return [speed for speed in measured if speed is not None]

    def measure(self, comm: SleepingComm, index: int) -> GroupSpeed | None:
        """Measure the process group of the ranks of `comm`, and return it on its first rank. Collective.

        Args:
            index: Number of the worker.
        """
        self._job.watch.join_worker(comm, index, self._patience)
        ranks = tuple(comm.allgather(self._job.world.rank))
        with (
            self._make_folder(comm) as folder,
            RankGroup(comm, self._ready.host, index, self._patience, self._ready.slot) as group,
        ):
            params = {"mebibytes": _MEBIBYTES} if comm.rank == 0 else None
            began = clock.now()
            outcome = CheckEvaluator(
                self._ready, self._job.watch, folder, params, Limits(evaluation_timeout=self._patience)
            ).evaluate(group)
            return _make_speed(ranks, outcome, clock.now() - began) if outcome is not None else None

    @contextmanager
    def _make_folder(self, comm: SleepingComm) -> Iterator[Path]:
        with ExitStack() as held:
            folder = None
            if comm.rank == 0:
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-"))
            yield Path(comm.bcast(folder))


def _make_speed(ranks: tuple[int, ...], outcome: CheckOutcome, seconds: float) -> GroupSpeed:
    evaluation = outcome.evaluation
    metrics = evaluation.metrics
    if evaluation.failure or not metrics:  # Without a failure, the job is stopping.
        failure = evaluation.failure or "stopped"
        # gloo has no limit for a connection if nothing answers, so the supervisor has ended the trainers.
        is_late = failure.startswith(TIMEOUT_PREFIX) and "--evaluation-timeout" in failure
        return GroupSpeed(ranks, f"it was not measured within {seconds:.0f} s" if is_late else failure)
    return GroupSpeed(ranks, "", seconds - metrics["seconds"], metrics["latency"], metrics["bandwidth"])
