"""Measure the CPU time that the writer of the study needs per evaluation, while many others run.

    python -m benchmarks.writer

The calls that a leader sends for an evaluation are made directly, without MPI. Each leader
claims a trial, reports ten losses, ends the trial, and reads the changes since the last claim of
the same worker.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.utilization import LOSSES
from hpo import Categorical, Float, Int, SearchSpace

SPACE = SearchSpace(
    layers=Int(1, 20),
    lr=Float(1e-5, 1.0, log=True),
    width=Int(16, 4096, log=True),
    dropout=Float(0.0, 0.9),
    gamma=Float(0.0, 1.0),
    activation=Categorical("relu", "tanh", "elu"),
)


def measure(workers: int, evaluations: int) -> float:
    """Return the milliseconds of CPU time per evaluation.

    `workers` evaluations run at any time. Starting the first ones is not measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = make_writer(Path(folder), workers + evaluations)
        writer.health_gate = _make_gate(writer, workers)
        rng = random.Random(workers)
        running: deque[tuple[int, Any]] = deque()
        with writer.batch_writes():
            for worker in range(workers):
                running.append((worker, _claim(writer, rng, worker)))
            known = [0] * workers
            began = time.process_time()
            for _ in range(evaluations):
                worker, assignment = running.popleft()
                _evaluate(writer, assignment, rng)
                known[worker] += len(writer.answer("read_changes", known[worker]))
                running.append((worker, _claim(writer, rng, worker)))
                writer.commit_if_due()
            used = time.process_time() - began
    return 1000 * used / evaluations


def make_writer(folder: Path, budget: int) -> Any:
    """Return the writer of a new study in a folder, with this budget."""
    from hpo.store.cached_storage import CachedStorage
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.output_log import OutputLog
    from hpo.store.record import Record
    from hpo.store.storage import open_storage
    from hpo.store.study_writer import Claims, StudyWriter

    path = folder / "study.log"
    Record.create(path, "writer", SPACE.describe())
    storage = open_storage(path)
    mirror = CachedStorage(storage, storage.get_study_id_from_name("writer"))
    log = OutputLog(lambda trial: folder / f"{trial}.txt")
    writer = StudyWriter(mirror, "writer", log, CheckpointStore(folder))
    writer.claims = Claims(writer, SPACE.make_distributions(), budget)
    return writer


def _make_gate(writer: Any, workers: int) -> Any:
    from hpo.store.worker_health import HealthGate, WorkerHealth

    return HealthGate(writer, WorkerHealth(list(range(workers))), lambda *_: None)


_numbers = itertools.count()


def _claim(writer: Any, rng: random.Random, worker: int) -> Any:
    place = {"island": 0, "worker": worker, "generation": next(_numbers), "propagator": "ga"}
    return writer.answer("claim", SPACE.draw(rng), **place)


def _evaluate(writer: Any, assignment: Any, rng: random.Random) -> None:
    for step in range(1, LOSSES + 1):
        writer.answer("report", assignment, step, 1 / step)
    writer.answer("complete", assignment, rng.random(), 60.0, {"accuracy": 0.5})


def main() -> None:
    """Measure the writer with several numbers of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[250, 1000, 3000, 10000])
    parser.add_argument("--evaluations", type=int, default=1000, help="evaluations to measure")
    chosen = parser.parse_args()
    for workers in chosen.workers:
        milliseconds = measure(workers, chosen.evaluations)
        print(f"{workers} running: {milliseconds:.2f} ms of CPU per evaluation", flush=True)


if __name__ == "__main__":
    main()
