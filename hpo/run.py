"""One run, from its options to its summary, on all ranks together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ContextManager, TypeVar

from hpo.communicator import SleepingComm, same_host
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import Options
from hpo.search_file import SearchFile, load_search_file
from hpo.sharing import share

if TYPE_CHECKING:
    from hpo.session import Session

T = TypeVar("T")


def run(options: Options, layout: Layout, world: SleepingComm) -> None:
    """Run a search to its end; collective over `world`, which the layout divides.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    started = time.time()
    search = _together(world, lambda: load_search_file(options.search_space))
    # Imported here, where most mistakes would have been found: torch and propulate take seconds.
    from hpo import session
    from hpo.evaluation import Evaluator
    from hpo.islands import run_islands
    from hpo.worker import Worker

    before = _on_first(world, lambda: session.previous(options, search))
    settings = _together(world, lambda: search.settings([*before.get("set", []), *options.settings]))
    host = same_host(world)
    data = _prepare(search, settings, world, host)
    hosts = sum(world.allgather(host.rank == 0))
    this = _on_first(world, lambda: session.begin(options, layout, search, settings, before, hosts))
    index = layout.worker_of(world.rank)
    subcommunicator = SleepingComm(world.Split(index, world.rank))
    record = this.open_record() if subcommunicator.rank == 0 else None
    evaluations = world.bcast(record.evaluations() if world.rank == 0 and record else None)
    with Worker(subcommunicator, host, index, this.seed, data) as worker, _progress(world, this):
        run_islands(
            search.space,
            Evaluator(search, settings, worker, record, this.budget),
            layout,
            world,
            worker=index,
            past=evaluations,
            migration_probability=options.migration_probability,
            pollination=options.pollination,
            seed=this.seed,
        )
    if world.rank == 0 and record:
        _report(this, record.evaluations(), options.top_n, layout.workers, started)
    world.barrier()


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


def _on_first(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Take a step on the first rank, and give its result to all."""
    result: T = comm.bcast(_together(comm, lambda: step() if comm.rank == 0 else None))
    return result


def _prepare(search: SearchFile, settings: Any, world: SleepingComm, host: SleepingComm) -> Any:
    """Let the search space prepare its data once per host, and give every rank of a host the one copy of it.

    The job's first rank goes before those of the other hosts: where hosts share a file system, they find what it
    downloaded.
    """
    prepare = search.prepare
    if prepare is None:
        return None

    def prepared() -> Any:
        try:
            return search.call(prepare, settings=settings)
        except (OSError, ValueError) as error:
            raise UsageError(f"{search.path}: {error}") from error
        except Exception as error:
            raise UsageError(f"{search.path}: prepare failed:\n{traceback.format_exc().rstrip()}") from error

    first = _together(world, lambda: prepared() if world.rank == 0 else None)
    data = _together(world, lambda: prepared() if host.rank == 0 and world.rank != 0 else first)
    return share(data, host)


def _progress(world: SleepingComm, this: Session) -> ContextManager[object]:
    """Follow the record from the first rank, in a thread that has the record to itself."""
    if world.rank != 0:
        return nullcontext()
    from hpo.report.progress import Progress

    print(this.headline, flush=True)
    return Progress(this.open_record().evaluations, this.budget)


def _report(this: Session, evaluations: Any, top_n: int, workers: int, started: float) -> None:
    from hpo.report.tables import print_tables, print_times
    from hpo.run_dir import write_json
    from hpo.summary import summarize

    summary = summarize(evaluations, this.budget, top_n, time.time() - started, workers, since=started)
    write_json(this.run_dir.summary_json, summary)
    print_tables(summary)
    print_times(summary)
    print(f"The study is {this.storage}, the summary {this.run_dir.summary_json}", flush=True)
