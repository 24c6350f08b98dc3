"""Count the messages of searches on simulated ranks.

    python -m benchmarks.messages --workers 16 64 256

Ranks run the real code, in one process (`tests.simulator`). Each worker has one rank. Evaluations
take two minutes on average, and have one to four losses. Heartbeats, which each rank sends once a
second, are not counted.
"""

from __future__ import annotations

import argparse
import os
import pickle
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.simulator import mpi

mpi.install()  # before hpo is imported

from hpo.ranks import communicator  # noqa: E402
from hpo.ranks.rank_watch import _PING_KIND  # noqa: E402
from hpo.space import Float, SearchSpace  # noqa: E402
from tests.simulator.job import Plan, SimulatedJob  # noqa: E402
from tests.simulator.trainers import Behavior, choose_behavior  # noqa: E402

_EVALUATION_SECONDS = 120.0
_EVALUATIONS_PER_WORKER = 4
_SPACE = SearchSpace(x=Float(0.0, 1.0), y=Float(0.0, 1.0))


def choose(trial: int) -> Behavior:
    """Return what the objective of a trial does."""
    return choose_behavior(str(trial), 0.0, _EVALUATION_SECONDS)


def make_plan(workers: int, folder: Path) -> Plan:
    """Return a search without faults."""
    options = {
        "search_space": Path("simulated.py"),
        "run_dir": folder / "run",
        "ranks_per_worker": 1,
        "evaluations": _EVALUATIONS_PER_WORKER * workers,
        "propagators": ("random",),
        "test": False,
    }
    hosts = max(1, workers // 8)
    return Plan("", workers, hosts, options, _SPACE, choose, 1e-4, 0.0, 1e-4, 0.0, ())


def count_messages(workers: int) -> tuple[Counter[str], Counter[str]]:
    """Run a search in a forked process. Return the messages, and their bytes, by kind."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        exit_now = os._exit  # The simulation replaces it.
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(writer, pickle.dumps(_count_in_this_process(workers)))
        finally:
            exit_now(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as result:
        counts: tuple[Counter[str], Counter[str]] = pickle.loads(result.read())
    os.waitpid(process, 0)
    return counts


def _count_in_this_process(workers: int) -> tuple[Counter[str], Counter[str]]:
    messages: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    send = communicator.SleepingComm.send

    def count(comm: Any, obj: Any, dest: int, tag: int = 0) -> None:
        kind = _describe(obj)
        messages[kind] += 1
        sizes[kind] += len(pickle.dumps(obj))
        send(comm, obj, dest, tag)

    vars(communicator)["SleepingComm"].send = count
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        outcome = SimulatedJob(make_plan(workers, Path(folder))).run()
    assert (outcome.status, outcome.violation) == (0, "")
    return messages, sizes


def _describe(obj: Any) -> str:
    if not isinstance(obj, tuple):
        return "migrants"
    if obj[0] == _PING_KIND:
        return "heartbeats"
    return f"calls of {obj[1]}" if len(obj) == 4 else "answers"


def main() -> None:
    """Print a table for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256])
    for workers in parser.parse_args().workers:
        messages, sizes = count_messages(workers)
        evaluations = _EVALUATIONS_PER_WORKER * workers
        del messages["heartbeats"]
        print(f"{workers} workers: {messages.total() / evaluations:.1f} messages per evaluation")
        for kind, count in messages.most_common():
            size = sizes[kind] / count
            print(f"  {count / evaluations:6.2f} {kind}, {size:.0f} bytes each", flush=True)


if __name__ == "__main__":
    main()
