"""How many workers one writer serves: simulated leaders, without torch or trainings, which talk to the real writer.

    python -m benchmarks.scale

Each MPI process is many leaders, one thread each, which claim, report ten losses, and hear of all others, as leaders
do. The first process writes, while its main thread does what ``--beside`` says. File operations take as long as on a
parallel file system (benchmarks/slow.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
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

from benchmarks.shares import LOSSES
from benchmarks.slow import slow_files
from hpo import Categorical, Float, Int, SearchSpace

ROOT = Path(__file__).resolve().parents[1]
SPACE = SearchSpace(
    layers=Int(1, 20),
    lr=Float(1e-5, 1.0, log=True),
    width=Int(16, 4096, log=True),
    dropout=Float(0.0, 0.9),
    gamma=Float(0.0, 1.0),
    activation=Categorical("relu", "tanh", "elu"),
)


def _python() -> None:
    sum(number * number for number in range(1000))


def _native() -> None:
    sum(range(1_000_000))  # keeps Python's lock for 20 ms or so


def _training() -> None:
    import torch

    network = torch.nn.Sequential(torch.nn.Conv2d(8, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 3))
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(100):
        loss = network(torch.ones(16, 8, 16, 16)).square().mean()
        loss.backward()
        optimizer.step()


BESIDE: dict[str, Callable[[], None]] = {
    "nothing": lambda: time.sleep(0.05),
    "training": _training,
    "python": _python,
    "native": _native,
}


class Leader:
    """One simulated leader, which evaluates until its budget is spent."""

    def __init__(self, calls: Any, number: int, seconds: float, each: int) -> None:
        from hpo.breeding.evaluation_history import EvaluationHistory
        from hpo.store.study_client import StudyClient

        self._recorder = StudyClient(calls)
        self._past = EvaluationHistory(SPACE, self._recorder.read_changes)
        self._rng = random.Random(number)
        self._number = number
        self._seconds = seconds
        self._each = each
        self.waits: list[float] = []
        self.busy = 0.0
        self.learning = 0.0

    def run(self) -> None:
        """Evaluate so many individuals, one after the other."""
        from hpo.errors import DuplicateError

        time.sleep(self._rng.random() * self._seconds)  # they do not start together, nor end so
        for generation in range(self._each):
            began = time.perf_counter()
            used = time.thread_time()
            self._past.update()
            self.learning += time.thread_time() - used
            assignment = None
            while assignment is None:
                with suppress(DuplicateError):
                    params = self._past.draw_new(self._rng)
                    place = {"island": 0, "worker": self._number, "generation": generation, "propagator": "ga"}
                    assignment = self._recorder.claim(params or {}, **place)
            self.waits.append(time.perf_counter() - began)
            self._evaluate(assignment)

    def _evaluate(self, assignment: Any) -> None:
        began = time.perf_counter()
        for step in range(1, LOSSES + 1):
            time.sleep(self._seconds / LOSSES)
            self._recorder.report(assignment, step, 1 / step)
        seconds = time.perf_counter() - began
        self._recorder.complete(assignment, 1 / LOSSES + self._rng.random(), seconds, {"accuracy": 0.5})
        self.busy += seconds


def simulate(folder: Path, leaders: int, seconds: float, each: int, beside: str) -> None:
    """Be one process of the simulation; the first one prints what came of it."""
    from hpo.ranks.communicator import get_world
    from hpo.ranks.job import Job
    from hpo.ranks.rank_watch import RankWatch
    from hpo.run.writer_connection import connect_writer

    comm = get_world()
    with RankWatch(comm) as watch:
        job = Job(comm, watch)
        make_writer = partial(_writer, folder, leaders * comm.size * each) if job.is_first else None
        with connect_writer(job, make_writer) as (calls, _):
            first = comm.rank * leaders
            several = [Leader(calls, first + number, seconds, each) for number in range(leaders)]
            threads = [threading.Thread(target=leader.run) for leader in several]
            comm.barrier()
            memory, began = _memory(), time.perf_counter()
            for thread in threads:
                thread.start()
            used = time.process_time()
            while comm.rank == 0 and any(thread.is_alive() for thread in threads):
                BESIDE[beside]()
            for thread in threads:
                thread.join()
            span = time.perf_counter() - began
            used = time.process_time() - used
            calls.call("commit")
            told = (several, span, (_memory() - memory) / leaders)
            found = comm.gather([(one.waits, one.busy, one.learning) for one in several]), comm.gather(told[1:])
        if comm.rank == 0:
            _print(*found, used, beside)


def _writer(folder: Path, budget: int) -> Any:
    from hpo.store.cached_storage import CachedStorage
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.claims import Claims
    from hpo.store.output_log import OutputLog
    from hpo.store.record import Record
    from hpo.store.storage import open_storage
    from hpo.store.study_writer import StudyWriter

    path = folder / "study.log"
    Record.create(path, "scale", SPACE.describe())
    storage = open_storage(path)
    mirror = CachedStorage(storage, storage.get_study_id_from_name("scale"))
    record = Record(mirror, "scale")
    claims = Claims(record, SPACE.make_distributions(), budget)
    return StudyWriter(
        record, claims, OutputLog(lambda trial: folder / f"{trial}.txt"), CheckpointStore(folder), mirror
    )


def _memory() -> float:
    """Return this process's resident memory, in bytes."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _print(leaders: Any, processes: Any, used: float, beside: str) -> None:
    every = list(itertools.chain(*leaders))
    waits = sorted(itertools.chain(*(waits for waits, _, _ in every)))
    evaluations, span = len(waits), max(span for span, _ in processes)
    busy, waiting = sum(busy for _, busy, _ in every), sum(waits)
    others = evaluations * len(every)
    print(
        f"{len(every)} leaders, {evaluations} evaluations, {60 * evaluations / span:.0f} a minute, {beside} beside: "
        f"share {busy / (busy + waiting):.3f}; a claim takes {1000 * statistics.median(waits):.1f} ms, "
        f"99 in 100 {1000 * waits[int(0.99 * evaluations)]:.0f} at most, all {1000 * waits[-1]:.0f}; "
        f"first process {1000 * used / evaluations:.2f} ms of CPU an evaluation; each leader, for an evaluation of "
        f"another, {1e6 * sum(learning for _, _, learning in every) / others:.0f} us "
        f"and {statistics.mean(memory for _, memory in processes[1:] or processes) / evaluations:.0f} bytes",
        flush=True,
    )


def main() -> None:
    """Run simulations, one for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="of an evaluation")
    parser.add_argument("--each", type=int, default=3, help="evaluations of each worker")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of a file operation")
    parser.add_argument("--beside", choices=BESIDE, nargs="+", default=["nothing"], help="in the writer's process")
    parser.add_argument("--part-of", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part_of:
        simulate(chosen.part_of, chosen.workers[0], chosen.seconds, chosen.each, chosen.beside[0])
        return
    for workers, beside in itertools.product(chosen.workers, chosen.beside):
        with tempfile.TemporaryDirectory() as folder:
            slow = slow_files(Path(folder), chosen.milliseconds / 1000, str(ROOT))
            command = ["mpirun", "-n", str(chosen.processes), sys.executable, "-m", "benchmarks.scale"]
            command += ["--part-of", folder, "--workers", str(workers // chosen.processes)]
            command += ["--seconds", str(chosen.seconds), "--each", str(chosen.each), "--beside", beside]
            environment = {**os.environ, **slow, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environment, timeout=3600)


if __name__ == "__main__":
    main()
