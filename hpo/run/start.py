"""One run, from its options to its summary, on all ranks together."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from hpo.layout import Layout, usable_cores
from hpo.problem import Problem, load_search_file
from hpo.process.place import Places
from hpo.ranks.agreement import on_first, together
from hpo.ranks.communicator import SleepingComm, leave_no_segments, same_host
from hpo.ranks.job import Job
from hpo.ranks.sharing import Shared
from hpo.ranks.watch import Watch
from hpo.run.options import Options
from hpo.run.source import check_same
from hpo.text import duration

if TYPE_CHECKING:
    from hpo.evaluation.group import Group
    from hpo.run.request import Request

_SECONDS_BEFORE_JOB_ENDS = 60.0


def run(options: Options, layout: Layout, job: Job) -> int:
    """Run a search to its end, and return the exit status; collective over the job's ranks, which the layout divides.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    world, host = job.world, same_host(job.world)
    leave_no_segments(host)
    if job.is_first:
        _limit_time(options, job.watch)
    request, problem, shared = prepare(options, layout, world, host)
    from hpo.evaluation.evaluator import Task
    from hpo.evaluation.group import Group
    from hpo.evaluation.host import Host
    from hpo.evaluation.teams import Teams
    from hpo.run import session
    from hpo.run.stages import Stages
    from hpo.store.storage import opened_once

    hosts = [name for name in world.allgather(socket.gethostname() if host.rank == 0 else None) if name]
    with ExitStack() as held:
        data = held.enter_context(shared)
        held.enter_context(opened_once())
        run_dir = on_first(world, lambda: session.enter(options.run_dir, problem.file.path.stem, options.resume, held))
        this = on_first(world, lambda: session.begin(run_dir, request, hosts) if request else None)
        assert this is not None
        index = layout.worker_of(world.rank)
        worker = SleepingComm(world.Split(index, world.rank))
        here = held.enter_context(Host(host))
        group = held.enter_context(Group(worker, here, index, options.collective_timeout))
        join = partial(_join, job, Places(problem.file.location))
        join(group)
        teams = Teams(group, here, world, layout, join) if options.grow else None
        stages = Stages(options, job, this, Task(problem, data, this.manifest.seed), group, teams)
        stages.search()
        stages.confirm()
        return int(world.bcast(stages.end() if job.is_first else None))


def _join(job: Job, places: Places, group: Group) -> None:
    """Let this rank's watch, and what marks its lines, know the group that it is in; collective over the group."""
    job.watch.join(group.own_comm, group.index, places, group.patience)
    job.printed.join(group.index, group.rank)


def _limit_time(options: Options, watch: Watch) -> None:
    """Let the run stop before its time is over: what a person allows it, or what is left of its SLURM job."""
    if options.time_limit is not None:
        watch.end_after(options.time_limit, f"--time-limit {duration(options.time_limit)}")
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit() and int(job_end) > time.time():  # else of another job, or of this one before it was prolonged
        watch.end_after(int(job_end) - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the SLURM job")


def prepare(
    options: Options, layout: Layout, world: SleepingComm, host: SleepingComm
) -> tuple[Request | None, Problem, Shared]:
    """Load the search space on all ranks and its data once per host, and import what takes long.

    Where ranks share cores, they take turns: 8 ranks on 2 cores import torch in 15 s at once, and in 11 s two at a
    time. The job's first rank, which alone returns a request, checks everything before the others begin, so that a
    mistake shows in 3 s. It also prepares its data first: where hosts share a file system, the first ranks of the other
    hosts find what it has downloaded.
    """
    cores = len(usable_cores())

    def first_look() -> Request | None:
        if world.rank == 0:
            from hpo.run.request import resolve

            return resolve(options, layout)
        if host.rank < cores:
            _load(options)
        return None

    request = together(world, first_look)
    sha256, assignments = world.bcast((request.problem.file.sha256, request.assignments) if request else None)

    def turn() -> tuple[Problem, Any]:
        file = load_search_file(options.search_space)
        check_same(file, sha256)
        problem = request.problem if request else file.bound(assignments)
        data = problem.prepared() if world.rank == 0 else None
        _load(options)
        return problem, data

    problem, data = together(world, lambda: host.in_turns(cores, turn))
    data = together(world, lambda: problem.prepared() if host.rank == 0 and world.rank != 0 else data)
    return request, problem, together(world, lambda: Shared(data, host))


def _load(options: Options) -> None:
    """Import the search space, and the modules that import torch and Propulate."""
    load_search_file(options.search_space)
    from hpo.breeding import islands  # noqa: F401 - Propulate
    from hpo.evaluation import group  # noqa: F401 - torch
