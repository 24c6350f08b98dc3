"""One run, from its options to its summary, on all ranks together."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from hpo.layout import Layout, usable_cores
from hpo.problem import SearchFile, load_search_file
from hpo.process.printed import Printed
from hpo.ranks.agreement import on_first, together
from hpo.ranks.communicator import SleepingComm, leave_no_segments, same_host
from hpo.ranks.sharing import Shared
from hpo.ranks.watch import Watch
from hpo.run.given import read_given
from hpo.run.options import DEFAULT_PRUNER, Options
from hpo.run.source import check_same
from hpo.text import duration

_SECONDS_BEFORE_JOB_ENDS = 60.0


def run(options: Options, layout: Layout, world: SleepingComm, watch: Watch, printed: Printed) -> int:
    """Run a search to its end, and return the exit status; collective over `world`, which the layout divides.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    started = time.time()
    host = same_host(world)
    leave_no_segments(host)
    if world.rank == 0:
        _limit_time(options, watch)
    search, settings, before, data = _prepare(options, world, host)
    from hpo.evaluation.group import Group
    from hpo.run import session
    from hpo.run.stages import Stages
    from hpo.store.storage import opened_once

    hosts = [name for name in world.allgather(socket.gethostname() if host.rank == 0 else None) if name]
    with ExitStack() as held:
        held.enter_context(data)
        held.enter_context(opened_once())
        run_dir = on_first(world, lambda: session.enter(options, search, held))
        this = on_first(world, lambda: session.begin(run_dir, options, layout, search, settings, before, hosts))
        index = layout.worker_of(world.rank)
        subcommunicator = SleepingComm(world.Split(index, world.rank))
        group = held.enter_context(Group(subcommunicator, host, index, options.collective_timeout))
        stages = Stages(options, layout, world, watch, printed, search, settings, data, this, group, started)
        stages.search()
        stages.confirm()
        return int(world.bcast(stages.end() if world.rank == 0 else None))


def _limit_time(options: Options, watch: Watch) -> None:
    """Let the run stop before its time is over: what a person allows it, or what is left of its SLURM job."""
    if options.time_limit is not None:
        watch.end_after(options.time_limit, f"--time-limit {duration(options.time_limit)}")
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit() and int(job_end) > time.time():  # else it is of another job, or this one was prolonged
        watch.end_after(int(job_end) - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the SLURM job")


def _prepare(
    options: Options, world: SleepingComm, host: SleepingComm
) -> tuple[SearchFile, Any, dict[str, Any], Shared]:
    """Load the search space on all ranks and its data once per host, and import what takes long.

    Where ranks share cores, they take turns: 8 ranks on 2 cores import torch in 15 s at once, and in 11 s two at a
    time. The job's first rank looks at everything before it lets the others begin, so that a mistake shows in 3 s, and
    prepares its data before those of other hosts do: where hosts share a file system, they find what it downloaded.
    """
    cores = len(usable_cores())
    before, sha256 = on_first(
        world,
        lambda: (_checked(options), load_search_file(options.search_space).sha256),
        meanwhile=lambda: _load(options) if host.rank < cores else None,
    )

    def turn() -> tuple[SearchFile, Any, Any]:
        search = load_search_file(options.search_space)
        check_same(search, sha256)
        settings = search.settings(options.assignments(before))
        data = search.prepared(settings) if world.rank == 0 else None
        _load(options)
        return search, settings, data

    search, settings, data = together(world, lambda: host.in_turns(cores, turn))
    data = together(world, lambda: search.prepared(settings) if host.rank == 0 and world.rank != 0 else data)
    return search, settings, before, together(world, lambda: Shared(data, host))


def _checked(options: Options) -> dict[str, Any]:
    """Check the search space, its settings and the run to be resumed, and return that run's run.json."""
    from hpo.evaluation.pruning import make_pruner
    from hpo.run.inheritance import read_inheritance
    from hpo.run.session import previous

    search = load_search_file(options.search_space)
    before = previous(options, search)
    options.check_space(search.space, before)
    make_pruner(options.pruner if options.pruner is not None else before.get("pruner", DEFAULT_PRUNER))
    if options.start_with is not None:
        read_given(options.start_with, search.space, 0)
    if options.start_from is not None:
        read_inheritance(options.start_from, search.space)
    search.settings(options.settings)
    search.settings(options.assignments(before))
    return before


def _load(options: Options) -> None:
    """Import the search space, and the modules that import torch and Propulate."""
    load_search_file(options.search_space)
    for module in ("hpo.evaluation.group", "hpo.breeding.islands"):
        import_module(module)
