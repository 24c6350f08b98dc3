"""Runs on disk as MPI jobs leave them, recorded without one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hpo.layout import Layout
from hpo.problem import load_search_file
from hpo.run.options import Options
from hpo.run.request import resolve
from hpo.run.session import Session, begin, enter
from hpo.store.record import Assignment, Record
from hpo.store.trials import rank
from tests.conftest import SEARCHES
from tests.support.claiming import claim

QUICK = SEARCHES / "quick.py"
HOSTILE = "rank 1: ValueError: =1+1, \x1b[31m\0<b>[red]\N{PILE OF POO}\udcff" + "x" * 10_000


def start(run_dir: Path, search_file: Path = QUICK, **options: Any) -> Session:
    """Begin or resume a session as run_islands.py does, on two workers of two ranks."""
    given = Options(search_file, run_dir=run_dir, **options)
    request = resolve(given, Layout(4, 2, 2))
    with ExitStack() as held:
        return begin(enter(given.run_dir, search_file.stem, given.resume, held), request, ["host"])


def started(record: Record, depth: int, **others: Any) -> Assignment:
    """Start an evaluation of the quick search, on island 1 and worker 1."""
    act = "relu" if depth < 5 else "tanh"
    params = {"depth": depth, "act": act, "flag": depth % 2 == 0, "lr": depth / 10, **others}
    distributions = load_search_file(QUICK).space.distributions()
    place = {"island": 1, "worker": 1, "generation": depth, "propagator": "ga"}
    assignment = claim(record, params, distributions, 99, **place)
    for epoch in (1, 2, 3):
        record.report(assignment, epoch, depth + 1 / epoch)
    return assignment


def complete(record: Record, *depths: int) -> None:
    """Complete evaluations of the quick search, at a loss of their depth."""
    for depth in depths:
        record.complete(started(record, depth), float(depth), 1.5, {"accuracy": depth / 10})


def run_of_everything(folder: Path) -> Path:
    """Leave a run with an evaluation in every state there is.

    Trials 0 and 1 are taken over, 2 to 5 complete, 6 is pruned, 7 has failed, 8 was interrupted, 9 runs, and 10
    waits to repeat the interrupted one. Of the best, one confirmation is complete, and one waits.
    """
    before = start(folder / "before").open_record()
    complete(before, 1)
    before.prune(started(before, 2), 2.5, 0.5, {})
    session = start(folder / "run", start_from=str(folder / "before"), confirm=2)
    record, space = session.open_record(), load_search_file(QUICK).space
    complete(record, 3, 4, 5, 6)
    record.prune(started(record, 7), 7.3, 0.7, {})
    record.fail(started(record, 8), HOSTILE, "Traceback ...", 0.8)
    interrupted, running = started(record, 9, lr=0.95), started(record, 9)
    record.interrupt(interrupted)
    assert running.params["lr"] == 0.9
    session.create_confirmations(space)
    confirmations = session.open_confirmations()
    total = session.plan.begin(confirmations, rank(record.evaluations(), 1), space)
    assignment = claim(confirmations, None, {}, total, island=0, worker=0)
    confirmations.complete(assignment, 1.25, 2.0, {})
    return folder / "run"
