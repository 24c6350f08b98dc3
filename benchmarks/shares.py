"""Which share of a run's time its evaluations have, on local disks and where files are slow.

    python -m benchmarks.shares

Workers of one rank, whose objectives sleep between ten losses, from the first start to the last end. The time that a
parallel file system takes for an fsync, an exclusive create, a rename or an unlink is added in Python.
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

# This file is a search space too: of objectives that sleep.
space = SearchSpace(x=Float(0.0, 1.0), y=Float(0.0, 1.0), lr=Float(1e-4, 1.0, log=True))


@dataclass(frozen=True)
class Settings:
    """How long an evaluation takes."""

    seconds: float = 4.0


def objective(params: dict[str, Any], _: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield losses that fall."""
    for step in range(LOSSES):
        time.sleep(settings.seconds / LOSSES)
        yield params["x"] + params["y"] + 1 / (1 + step), {"accuracy": step / LOSSES}


def share(evaluations: list[Evaluation], workers: int) -> float:
    """Return the share of the workers' time, from the first start to the last end, in which they evaluate."""
    span = max(one.ended for one in evaluations) - min(one.started for one in evaluations)
    return sum(one.seconds for one in evaluations) / (workers * span)


def measure(workers: int, delay: float, each: int, seconds: float, *options: str) -> float:
    """Run a search of so many workers, with `each` so many evaluations; `delay` is in seconds per file operation."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **(slow_files(Path(folder), delay) if delay else {})}
        command = ["mpirun", "-n", str(workers), sys.executable, str(ROOT / "run_islands.py"), __file__]
        command += ["--ranks-per-worker", "1", "--evaluations", str(each * workers), "--run-dir", f"{folder}/run"]
        command += ["--set", f"seconds={seconds}", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT, timeout=3600)
        return share(RunReader(Path(folder, "run")).read_evaluations(), workers)


def main() -> None:
    """Print the share for each number of workers and each delay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 8, 24], help="in pairs with the delays")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0, 0, 5, 5], help="of a file operation")
    parser.add_argument("--seconds", type=float, default=4.0, help="of an evaluation")
    parser.add_argument("--each", type=int, default=5, help="evaluations of each worker")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the search")
    chosen = parser.parse_args()
    for workers, delay in zip(chosen.workers, chosen.milliseconds, strict=True):
        found = measure(workers, delay / 1000, chosen.each, chosen.seconds, *chosen.options)
        print(f"{workers:3} workers, {delay:g} ms per file operation: {found:.3f}", flush=True)


if __name__ == "__main__":
    main()
