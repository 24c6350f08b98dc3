"""Measure the share of time in which workers evaluate, with fast and with slow file operations.

    python -m benchmarks.utilization

Workers have one rank. The objective sleeps between ten losses. Slow file operations simulate a
parallel file system: Python delays each fsync, exclusive create, rename and unlink.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.slow import slow_files
from hpo import Float, SearchSpace
from hpo.results.reader import RunReader

if TYPE_CHECKING:
    from hpo.store.evaluations import Evaluation
    from hpo.trainer.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
LOSSES = 10

# This file is also a search file, with an objective that sleeps.
space = SearchSpace(x=Float(0.0, 1.0), y=Float(0.0, 1.0), lr=Float(1e-4, 1.0, log=True))


@dataclass(frozen=True)
class Settings:
    """Settings of this search: the duration of an evaluation in seconds."""

    seconds: float = 4.0


def objective(
    params: dict[str, Any], _: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield decreasing losses, and sleep before each of them."""
    for step in range(LOSSES):
        time.sleep(settings.seconds / LOSSES)
        yield params["x"] + params["y"] + 1 / (1 + step), {"accuracy": step / LOSSES}


def compute_utilization(evaluations: list[Evaluation], workers: int) -> float:
    """Compute the share of time in which workers evaluate, from the first start to the last end."""
    span = max(one.ended for one in evaluations) - min(one.started for one in evaluations)
    return sum(one.seconds for one in evaluations) / (workers * span)


def measure(workers: int, delay: float, each: int, seconds: float, *options: str) -> float:
    """Run a search with `each` evaluations per worker, and return its utilization.

    Args:
        workers: Number of workers, of one rank each.
        delay: Seconds by which each file operation is delayed.
        each: Number of evaluations per worker.
        seconds: Duration of an evaluation.
        *options: Further options of run_islands.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **(slow_files(Path(folder), delay) if delay else {})}
        command = [
            "mpirun",
            "-n",
            str(workers),
            sys.executable,
            str(ROOT / "run_islands.py"),
            __file__,
        ]
        command += [
            "--ranks-per-worker",
            "1",
            "--evaluations",
            str(each * workers),
            "--run-dir",
            f"{folder}/run",
        ]
        command += ["--set", f"seconds={seconds}", *options]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT, timeout=3600
        )
        return compute_utilization(RunReader(Path(folder, "run")).read_evaluations(), workers)


def main() -> None:
    """Print the utilization for each number of workers and each delay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[8, 32, 8, 24], help="one for each delay"
    )
    parser.add_argument(
        "--milliseconds",
        type=float,
        nargs="+",
        default=[0, 0, 5, 5],
        help="delays of a file operation",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of an evaluation")
    parser.add_argument("--each", type=int, default=5, help="evaluations per worker")
    parser.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], help="options of the search"
    )
    chosen = parser.parse_args()
    for workers, delay in zip(chosen.workers, chosen.milliseconds, strict=True):
        found = measure(workers, delay / 1000, chosen.each, chosen.seconds, *chosen.options)
        print(f"{workers:3} workers, {delay:g} ms per file operation: {found:.3f}", flush=True)


if __name__ == "__main__":
    main()
