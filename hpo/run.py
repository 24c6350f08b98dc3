"""One run, from its options to its summary, on all ranks together."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from hpo.communicator import SleepingComm, same_host
from hpo.errors import Exit, UsageError
from hpo.given import read_given
from hpo.layout import Layout, usable_cores
from hpo.options import DEFAULT_PRUNER, Options
from hpo.report.text import duration
from hpo.search_file import SearchFile, load_search_file
from hpo.sharing import share
from hpo.watch import Stop, Watch

if TYPE_CHECKING:
    from hpo.session import Session

T = TypeVar("T")

_SECONDS_BEFORE_JOB_ENDS = 60.0


def run(options: Options, layout: Layout, world: SleepingComm, watch: Watch) -> int:
    """Run a search to its end, and give the exit status; collective over `world`, which the layout divides.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    started = time.time()
    host = same_host(world)
    if world.rank == 0:
        _limit_time(options, watch)
    search, settings, before, data = _prepare(options, world, host)
    from hpo import session
    from hpo.evaluation import Evaluator, Limits, target_reached
    from hpo.islands import run_islands
    from hpo.pruning import make_pruner
    from hpo.worker import Worker

    target = -math.inf if options.target_loss is None else options.target_loss
    limits = Limits(options.collective_timeout, options.evaluation_timeout or math.inf, options.max_failures, target)
    hosts = sum(world.allgather(host.rank == 0))
    with ExitStack() as held:
        run_dir = _on_first(world, lambda: session.enter(options, search, held))
        this = _on_first(world, lambda: session.begin(run_dir, options, layout, search, settings, before, hosts))
        index = layout.worker_of(world.rank)
        subcommunicator = SleepingComm(world.Split(index, world.rank))
        record = this.open_record() if subcommunicator.rank == 0 else None

        reached = False

        def report() -> int:
            stopping = target_reached(target) if reached else watch.stopping
            return _report(this, stopping, search.space.size, options.top_n, layout.workers, started)

        if world.rank == 0:
            watch.last_words = report
        if options.target_loss is not None:
            reached = _on_first(world, lambda: _has_reached(this, target))
        if reached:
            return int(world.bcast(report() if world.rank == 0 else None))
        worker = Worker(subcommunicator, host, index, this.seed, data, limits.collective_timeout)
        with worker, _progress(world, this, watch):
            run_islands(
                search.space,
                Evaluator(search, settings, worker, watch, record, this.budget, limits, make_pruner(this.pruner)),
                layout,
                world,
                worker=index,
                propagators=this.propagators,
                record=record,
                migration_probability=options.migration_probability,
                pollination=options.pollination,
                seed=this.seed,
            )
        return int(world.bcast(report() if world.rank == 0 else None))


def _limit_time(options: Options, watch: Watch) -> None:
    """Let the run stop before its time is over: what a person allows it, or what is left of its SLURM job."""
    if options.time_limit is not None:
        watch.end_after(options.time_limit, f"--time-limit {duration(options.time_limit)}")
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit() and int(job_end) > time.time():  # else it is of another job, or this one was prolonged
        watch.end_after(int(job_end) - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the SLURM job")


def _prepare(options: Options, world: SleepingComm, host: SleepingComm) -> tuple[SearchFile, Any, dict[str, Any], Any]:
    """Load the search space on all ranks and its data once per host, and import what takes long.

    Where ranks share cores, they take turns: 8 ranks on 2 cores import torch in 15 s at once, and in 11 s two at a
    time. The job's first rank looks at everything before it lets the others begin, so that a mistake shows in 3 s, and
    prepares its data before those of other hosts do: where hosts share a file system, they find what it downloaded.
    """
    cores = len(usable_cores())
    before = _on_first(
        world, lambda: _checked(options), meanwhile=lambda: _load(options) if host.rank < cores else None
    )

    def turn() -> tuple[SearchFile, Any, Any]:
        search = load_search_file(options.search_space)
        settings = search.settings(options.assignments(before))
        data = search.prepared(settings) if world.rank == 0 else None
        _load(options)
        return search, settings, data

    search, settings, data = _together(world, lambda: host.in_turns(cores, turn))
    data = _together(world, lambda: search.prepared(settings) if host.rank == 0 and world.rank != 0 else data)
    return search, settings, before, _together(world, lambda: share(data, host))


def _checked(options: Options) -> dict[str, Any]:
    """Check the search space, its settings and the run to be resumed, and give that run's run.json."""
    from hpo.pruning import make_pruner
    from hpo.session import previous

    search = load_search_file(options.search_space)
    before = previous(options, search)
    options.check_space(search.space, before)
    make_pruner(options.pruner if options.pruner is not None else before.get("pruner", DEFAULT_PRUNER))
    if options.start_with is not None:
        read_given(options.start_with, search.space, 0)
    search.settings(options.settings)
    search.settings(options.assignments(before))
    return before


def _load(options: Options) -> None:
    """Import the search space, and the modules that import torch and Propulate."""
    load_search_file(options.search_space)
    for module in ("hpo.worker", "hpo.islands"):
        import_module(module)


def _together(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Take a step on every rank; where it finds a person's mistake on any, raise that one on all."""
    result, mistake = None, None
    try:
        result = step()
    except UsageError as error:
        mistake = str(error)
    mistakes = [mistake for mistake in comm.allgather(mistake) if mistake is not None]
    if mistakes:
        raise UsageError(mistakes[0])
    return result  # type: ignore[return-value]


def _on_first(comm: SleepingComm, step: Callable[[], T], meanwhile: Callable[[], object] = lambda: None) -> T:
    """Take a step on the first rank, and give its result to all; the others do something else meanwhile."""
    result = _together(comm, lambda: step() if comm.rank == 0 else meanwhile())
    return comm.bcast(result if comm.rank == 0 else None)  # type: ignore[no-any-return]


def _progress(world: SleepingComm, this: Session, watch: Watch) -> AbstractContextManager[object]:
    """Follow the record from the first rank, in a thread that has the record to itself."""
    if world.rank != 0:
        return nullcontext()
    from hpo.report.progress import Progress

    print(this.headline, flush=True)
    return Progress(this.open_record().evaluations, this.budget, on_error=watch.die)


def _has_reached(this: Session, target: float) -> bool:
    """Tell whether an earlier session has found what this one is to find."""
    from hpo.record import rank

    return any(evaluation.loss <= target for evaluation in rank(this.open_record().evaluations(), 1))


def _report(this: Session, stopping: Stop | None, size: float, top_n: int, workers: int, started: float) -> int:
    """Print and write the run's summary as the record has it, and give the exit status that goes with it."""
    from hpo.report.tables import print_tables, print_times
    from hpo.run_dir import write_json
    from hpo.storage import without_password
    from hpo.summary import busy_fraction, spent, summarize

    evaluations = this.open_record().evaluations()
    stopped = stopping if stopping and not spent(evaluations, this.budget) else None
    summary = summarize(evaluations, this.budget, top_n)
    summary["stopped"] = stopped.reason if stopped else None
    summary["exhausted"] = sum(evaluation.finished for evaluation in evaluations) >= size
    summary["wall_seconds"] = round(time.time() - started, 3)
    summary["worker_busy_fraction"] = busy_fraction(evaluations, workers, since=started)
    print_tables(summary)
    nothing_new = summary["worker_busy_fraction"] is None
    if not nothing_new or not this.run_dir.summary_json.exists():
        write_json(this.run_dir.summary_json, summary)
    if not nothing_new:
        print_times(summary)
    if summary["exhausted"]:
        print(f"The search space is exhausted: it has {size:.0f} individuals, and all were evaluated")
    print(f"The study is {without_password(this.storage)}, the summary {this.run_dir.summary_json}")
    if stopped:
        print(f"Stopped: {stopped.reason}. To go on: --run-dir {this.run_dir.path} --resume")
    sys.stdout.flush()
    if stopped:
        return stopped.status
    return Exit.BUDGET_SPENT if summary["best"] else Exit.NOTHING_SUCCEEDED
