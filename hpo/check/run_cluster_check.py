"""Run `hpo check-cluster`, which tests a job without a search of the user. All ranks take part.

The ranks collect facts about their hosts, clocks, run directory and process groups. The first rank
prints them, and the findings. Trainers measure their process groups by an objective, as in an
evaluation of a search.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from hpo.check.check_evaluator import CheckEvaluator
from hpo.check.cluster_report import (
    ClockOffset,
    ClusterFacts,
    FolderFacts,
    FolderView,
    GroupSpeed,
    RankFacts,
    judge_cluster,
    print_cluster,
)
from hpo.check.finding import print_findings
from hpo.check.run_check import is_stopping, report_stop
from hpo.errors import ExitStatus, RunError, UsageError
from hpo.evaluation.leader import Limits
from hpo.evaluation.verdict import TIMEOUT_PREFIX
from hpo.layout import Layout, list_usable_cores
from hpo.options import Options
from hpo.process import clock
from hpo.process.launcher import describe_launcher, describe_scheduler
from hpo.process.linux import count_threads_per_core, identify_container
from hpo.ranks.communicator import SleepingComm, describe_mpi, sleep_until
from hpo.ranks.job import Job, run_on_all
from hpo.run.prepare_rank import RankState, prepare_rank
from hpo.run.run_search import find_job_end
from hpo.store.run_dir import RUNS_DIR, find_existing, try_system_lock, write_atomically
from hpo.text_format import format_count

_MEBIBYTES = 25  # size of the gradient buckets of DistributedDataParallel
_CLOCK_ROUNDS = 10
_WRITES = 10
_SECONDS_TO_SEE = 10.0  # maximum seconds to wait until another host has seen a change
_LOCK = "lock"
_NOTE = "note"


def run_cluster_check(options: Options, layout: Layout, job: Job) -> int:
    """Check a job, and return status 0 if nothing is wrong, 1 otherwise. Collective.

    Args:
        options: The options, with the search file that measures process groups.
        job: The MPI job. Its ranks are sorted by host.

    Raises:
        UsageError: The run directory cannot be used. The error is raised on all ranks, before
            anything is measured.
    """
    with ExitStack() as leftovers:

        def stop_late() -> int:
            leftovers.close()  # Temporary files must not stay when the job is ended.
            return ExitStatus.INTERRUPTED

        if job.is_first:
            job.watch.set_stop_callbacks(lambda: None, stop_late)
        with prepare_rank(options, layout, job) as ready:
            job.watch.join_worker(job.world, 0, options.collective_timeout)
            facts = _collect_facts(options, layout, job, ready, leftovers)
            if is_stopping(job):
                return report_stop(job)
            status = ExitStatus.BUDGET_SPENT
            if facts is not None:
                print_cluster(facts)
                status = print_findings(judge_cluster(facts), options.as_json)
            return int(job.world.bcast(status))


def _collect_facts(
    options: Options, layout: Layout, job: Job, ready: RankState, leftovers: ExitStack
) -> ClusterFacts | None:
    """Return all facts on the first rank, unless the job is stopping. Collective."""
    world = job.world
    own = RankFacts(
        **vars(ready.place),
        cores=tuple(list_usable_cores()),
        host_cores=os.cpu_count() or 1,
        threads_per_core=count_threads_per_core(),
        container=identify_container(),
    )
    ranks: list[RankFacts] = world.allgather(own)
    hosts = [rank.host for rank in ranks]
    is_head = hosts.index(hosts[world.rank]) == world.rank
    split = world.split(int(is_head), world.rank)
    heads = split if is_head else None
    folder, views = _test_folder(options.run_dir or RUNS_DIR, job, heads, leftovers)
    if job.is_first:
        print(f"{layout}, {format_count(len(set(hosts)), 'host')}", flush=True)
    clocks = _measure_clock_offsets(heads) if heads is not None else []
    if is_stopping(job):
        return None
    # Otherwise the first trainer would wait until its template has imported the compiler.
    ready.slot.provide_trainer({})
    world.barrier()
    # The process groups of all workers are measured at the same time.
    patience = options.collective_timeout
    worker = layout.find_worker(world.rank)
    own_group = world.split(worker, world.rank)
    measured = world.allgather(_measure_group(own_group, job, ready, patience, worker))
    speeds: list[GroupSpeed] = [speed for speed in measured if speed is not None]
    # If a worker that spans hosts has failed, the next group would probably fail as late.
    is_network_known = any(
        speed.failure and len({hosts[rank] for rank in speed.ranks}) > 1 for speed in speeds
    )
    if is_stopping(job):
        return None
    between = None
    if heads is not None and heads.size > 1 and not is_network_known:
        between = _measure_group(heads, job, ready, patience, worker=0)
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


def _measure_clock_offsets(heads: SleepingComm) -> list[ClockOffset]:
    """Return the clock offset of each host; complete only on the first rank.

    Method: Cristian's algorithm. The offset comes from the message with the shortest round trip.
    Half of this round trip is the maximum error (Cristian, "Probabilistic clock synchronization",
    Distributed Computing 3, 1989).

    Collective: call on all ranks of `heads`, which has one rank of each host.
    """
    offsets = [ClockOffset(0.0, 0.0)]
    for peer in range(1, heads.size):
        measured = []
        for _ in range(_CLOCK_ROUNDS):
            if heads.rank == 0:
                sent = time.time()
                heads.send(None, dest=peer)
                theirs: float = heads.recv(source=peer)
                received = time.time()
                measured.append(ClockOffset(theirs - (sent + received) / 2, (received - sent) / 2))
            elif heads.rank == peer:
                heads.recv(source=0)
                heads.send(time.time(), dest=0)
        if heads.rank == 0:
            offsets.append(min(measured, key=lambda offset: offset.error))
    return offsets


def _test_folder(
    run_dir: Path, job: Job, heads: SleepingComm | None, leftovers: ExitStack
) -> tuple[FolderFacts | None, list[FolderView]]:
    """Test the folder of a run directory, and return facts on the first rank. Collective.

    Args:
        heads: Communicator of one rank of each host; None on other ranks.
        leftovers: Gets a callback that removes the temporary folder, for a stop of the job.
    """
    test = run_on_all(job.world, lambda: FolderTest(run_dir) if job.is_first else None)
    if test is not None:
        leftovers.callback(test.close)
    path = job.world.bcast(test.folder if test is not None else None)
    views = []
    if heads is not None:
        views = _compare_views(heads, path, lambda: job.watch.active_stop is not None)
    if test is None:
        return None, views
    test.close()
    return test.facts, views


class FolderTest:
    """A test of the folder in which a run directory is, or would be made.

    It writes into a temporary folder, which `close` removes.

    Raises:
        UsageError: The folder cannot be used.
    """

    def __init__(self, run_dir: Path) -> None:
        self._resources = ExitStack()
        existing = find_existing(run_dir)
        try:
            temporary = tempfile.TemporaryDirectory(prefix=".hpo-check-", dir=existing)
            self.folder = Path(self._resources.enter_context(temporary))
            seconds = []
            for _ in range(_WRITES):
                began = time.perf_counter()
                write_atomically(self.folder / "written", b"durable")
                seconds.append(time.perf_counter() - began)
            lock = self._resources.enter_context((self.folder / _LOCK).open("w"))
            has_locks = try_system_lock(lock) is True
            free = shutil.disk_usage(existing).free
        except (OSError, RunError) as error:
            self.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"--run-dir {run_dir}: {existing} cannot be used: {reason}") from error
        file_system = find_file_system(existing.resolve())
        write_seconds = statistics.median(seconds)
        self.facts = FolderFacts(existing, file_system, free, has_locks, write_seconds)

    def close(self) -> None:
        """Remove the temporary folder."""
        with suppress(OSError):  # Another host may have it open on NFS.
            self._resources.close()


def _compare_views(
    heads: SleepingComm, folder: Path, should_stop: Callable[[], bool]
) -> list[FolderView]:
    """Return how each host sees the folder of a `FolderTest`. Collective over `heads`.

    The first rank of `heads` has made the folder. If `should_stop()` is true, the check waits no
    longer for other hosts.
    """

    def wait_for(done: Callable[[], bool]) -> float | None:
        began = time.monotonic()
        sleep_until(lambda: done() or should_stop(), _SECONDS_TO_SEE)
        return time.monotonic() - began if done() else None

    note = folder / _NOTE
    files = [folder / f"host-{host}" for host in range(heads.size)]
    if heads.rank == 0:
        note.write_text("first")
    heads.barrier()
    own = FolderView(0.0, sees_lock=True, is_seen=True)
    if heads.rank != 0:
        own = FolderView(
            wait_for(lambda: _read(note) == "first"), sees_lock=_is_locked(folder / _LOCK)
        )
        try:
            files[heads.rank].touch()
        except OSError as error:
            own = replace(own, write_error=error.strerror or str(error))
    heads.barrier()
    if heads.rank == 0:
        write_atomically(note, b"second")
    heads.barrier()
    if heads.rank != 0 and own.seconds_to_see is not None:
        own = replace(own, seconds_to_see=wait_for(lambda: _read(note) == "second"))
    views: list[FolderView] = heads.allgather(own)
    if heads.rank == 0 and all(
        view.seconds_to_see is not None and not view.write_error for view in views
    ):
        wait_for(lambda: set(files[1:]) <= set(folder.iterdir()))
        seen = {files[0], *folder.iterdir()}
        views = [
            replace(view, is_seen=file in seen) for view, file in zip(views, files, strict=True)
        ]
    return views


def find_file_system(path: Path) -> str:
    """Return the type of a path's file system, such as nfs4; an empty text if unknown."""
    with suppress(OSError, ValueError):  # Only Linux has /proc.
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        # A space in a path is written as \040.
        mounts = [
            (Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words[1])), words[2])
            for words in lines
        ]
        # The last of several mounts at one place hides the others.
        above = (
            (len(place.parts), index, kind)
            for index, (place, kind) in enumerate(mounts)
            if path.is_relative_to(place)
        )
        return max(above)[2]
    return ""


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def _is_locked(path: Path) -> bool:
    with suppress(OSError), path.open() as file:
        return try_system_lock(file, shared=True) is False
    return False


def _measure_group(
    comm: SleepingComm, job: Job, ready: RankState, patience: float, worker: int
) -> GroupSpeed | None:
    """Measure the ranks of `comm`, and return their speed on the first of them. Collective."""
    with ExitStack() as held:
        folder = None
        params = None
        if comm.rank == 0:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-")))
            params = {"mebibytes": _MEBIBYTES}
        limits = Limits(evaluation_timeout=patience)
        evaluator = CheckEvaluator(
            ready, job.watch, comm.bcast(folder), params, patience, limits, worker
        )
        group = held.enter_context(evaluator.form_worker(comm))
        ranks = tuple(comm.allgather(job.world.rank))
        began = clock.now()
        outcome = evaluator.evaluate(group)
        seconds = clock.now() - began
    if outcome is None:
        return None
    metrics = outcome.evaluation.metrics
    if not outcome.failure and metrics:
        connect = seconds - metrics["seconds"]
        return GroupSpeed(ranks, "", connect, metrics["latency"], metrics["bandwidth"])
    failure = outcome.failure or "stopped"  # Without a failure, the job is stopping.
    if failure.startswith(TIMEOUT_PREFIX) and "--evaluation-timeout" in failure:
        # gloo has no limit for a connection if nothing answers, so the supervisor has ended the
        # trainers.
        failure = f"it was not measured within {seconds:.0f} s"
    return GroupSpeed(ranks, failure)
