"""Measure how long a claim takes while the first rank, which answers it, does other work.

    python -m benchmarks.busy_rank --work nothing training python native

Simulated leaders, without torch, send to the real writer by MPI. Each MPI process runs many
leaders, one thread each. In each evaluation, a leader claims a trial from the writer, reports ten
losses, and receives the evaluations of all others. The first process runs the writer. Its main
thread also does other work, such as training, which ``--work`` selects. File operations are as slow
as on a parallel file system (benchmarks/slow.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.slow import slow_files
from benchmarks.utilization import LOSSES
from benchmarks.writer import SPACE, make_writer

ROOT = Path(__file__).resolve().parents[1]


def _run_python() -> None:
    sum(number * number for number in range(1000))


def _run_native_code() -> None:
    sum(range(1_000_000))  # Holds Python's lock for about 20 ms.


def _train_network() -> None:
    import torch

    network = torch.nn.Sequential(
        torch.nn.Conv2d(8, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3)
    )
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(100):
        loss = network(torch.ones(16, 8, 16, 16)).square().mean()
        loss.backward()
        optimizer.step()


WORK: dict[str, Callable[[], None]] = {
    "nothing": lambda: time.sleep(0.05),
    "training": _train_network,
    "python": _run_python,
    "native": _run_native_code,
}


class Leader:
    """One simulated leader."""

    def __init__(self, calls: Any, number: int, seconds: float, each: int) -> None:
        from hpo.breeding.evaluation_history import RecordedHistory
        from hpo.store.study_client import StudyClient

        self._recorder = StudyClient(calls.call, calls.notify)
        self._past = RecordedHistory(SPACE, self._recorder.objectives, self._recorder.read_changes)
        self._rng = random.Random(number)
        self._number = number
        self._seconds = seconds
        self._each = each
        self.waits: list[float] = []
        self.busy = 0.0

    def run(self) -> None:
        """Evaluate `each` individuals, one after another."""
        from hpo.errors import DuplicateError

        time.sleep(self._rng.random() * self._seconds)  # Leaders start and end at different times.
        for generation in range(self._each):
            began = time.perf_counter()
            self._past.update()
            assignment = None
            while assignment is None:
                with suppress(DuplicateError):
                    params = self._past.draw_new(self._rng)
                    place = {
                        "island": 0,
                        "worker": self._number,
                        "generation": generation,
                        "propagator": "ga",
                    }
                    assignment = self._recorder.claim(params or {}, **place)
            self.waits.append(time.perf_counter() - began)
            self._evaluate(assignment)

    def _evaluate(self, assignment: Any) -> None:
        began = time.perf_counter()
        for step in range(1, LOSSES + 1):
            time.sleep(self._seconds / LOSSES)
            self._recorder.notify.report(assignment, step, 1 / step)
        seconds = time.perf_counter() - began
        self._recorder.notify.complete(
            assignment, 1 / LOSSES + self._rng.random(), seconds, {"accuracy": 0.5}
        )
        self.busy += seconds


def run_process(folder: Path, leaders: int, seconds: float, each: int, work: str) -> None:
    """Run one MPI process of the simulation.

    The first process writes the study and prints the result.
    """
    from hpo.ranks.communicator import get_world
    from hpo.ranks.job import Job
    from hpo.ranks.rank_watch import RankWatch
    from hpo.run.run_search import connect_writer

    comm = get_world()
    with RankWatch(comm) as watch:
        job = Job(comm, watch)
        make = partial(make_writer, folder, leaders * comm.size * each) if job.is_first else None
        with connect_writer(job, make) as (calls, _):
            first = comm.rank * leaders
            several = [Leader(calls, first + number, seconds, each) for number in range(leaders)]
            threads = [threading.Thread(target=leader.run) for leader in several]
            comm.barrier()
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            used = time.process_time()
            while comm.rank == 0 and any(thread.is_alive() for thread in threads):
                WORK[work]()
            for thread in threads:
                thread.join()
            span = time.perf_counter() - began
            used = time.process_time() - used
            calls.call("commit")
            found = (comm.gather([(one.waits, one.busy) for one in several]), comm.gather(span))
        if comm.rank == 0:
            _print_result(*found, used, work)


def _print_result(leaders: Any, spans: Any, used: float, work: str) -> None:
    every = list(itertools.chain(*leaders))
    waits = sorted(itertools.chain(*(waits for waits, _ in every)))
    evaluations, span = len(waits), max(spans)
    busy, waiting = sum(busy for _, busy in every), sum(waits)
    print(
        f"{len(every)} leaders, {evaluations} evaluations, "
        f"{60 * evaluations / span:.0f} per minute; first process: {work}; "
        f"share {busy / (busy + waiting):.3f}; "
        f"a claim takes {1000 * statistics.median(waits):.1f} ms, "
        f"99th percentile {1000 * waits[int(0.99 * evaluations)]:.0f}, "
        f"maximum {1000 * waits[-1]:.0f}; "
        f"first process {1000 * used / evaluations:.2f} ms of CPU per evaluation",
        flush=True,
    )


def main() -> None:
    """Run a simulation for each number of workers and each kind of work of the first process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[200])
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=12.0, help="duration of an evaluation")
    parser.add_argument("--each", type=int, default=3, help="evaluations per worker")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="delay of a file operation")
    parser.add_argument(
        "--work", choices=WORK, nargs="+", default=["nothing"], help="work of the first process"
    )
    parser.add_argument("--part-of", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part_of:
        run_process(chosen.part_of, chosen.workers[0], chosen.seconds, chosen.each, chosen.work[0])
        return
    for workers, work in itertools.product(chosen.workers, chosen.work):
        with tempfile.TemporaryDirectory() as folder:
            slow = slow_files(Path(folder), chosen.milliseconds / 1000, str(ROOT))
            command = [
                "mpirun",
                "-n",
                str(chosen.processes),
                sys.executable,
                "-m",
                "benchmarks.busy_rank",
            ]
            command += ["--part-of", folder, "--workers", str(workers // chosen.processes)]
            command += [
                "--seconds",
                str(chosen.seconds),
                "--each",
                str(chosen.each),
                "--work",
                work,
            ]
            environment = {**os.environ, **slow, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, timeout=3600)


if __name__ == "__main__":
    main()
