"""Measure population based training (PBT) on a problem with a known best schedule.

    python -m benchmarks.pbt --seeds 5

The script runs this file as a search with `--pbt`. Each epoch multiplies the loss by 1 - lr / 2. So
a learning rate of 1 is always best. The script prints the learning rates of the best individual and
its ancestors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo import Float, SearchSpace
from hpo.trainer.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
LOW = 0.5  # A lower learning rate reduces the loss by less than half of the possible reduction.

space = SearchSpace(lr=Float(0.01, 1.0, log=True, mutable=True))


@dataclass(frozen=True)
class Settings:
    """Settings of this search."""

    epochs: int = 2


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[float]:
    """Start with the loss of the parent, or with 1 without a parent.

    Multiply it by the same factor in each epoch.
    """
    parent = worker.parent_checkpoint
    loss = parent["loss"] if parent else 1.0
    for _ in range(settings.epochs):
        loss *= 1 - params["lr"] / 2
        worker.save_checkpoint({"loss": loss})
        yield loss


def run_search(seed: int, ranks: int, options: list[str]) -> list[dict[str, Any]]:
    """Run the search, and return the best individual and its ancestors, the oldest first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "mpirun",
            "-n",
            str(ranks),
            sys.executable,
            str(ROOT / "run_islands.py"),
            __file__,
            "--pbt",
        ]
        command += ["--run-dir", f"{folder}/run", "--seed", str(seed), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=600, check=True)
        line: list[dict[str, Any]] = json.loads(Path(folder, "run", "summary.json").read_text())[
            "lineage"
        ]
    return line


def main() -> None:
    """Print a row for each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--propagators", default="ga")
    chosen = parser.parse_args()
    print(
        f"{'seed':>4s}{'best loss':>12s}{'length':>7s}{f'lr < {LOW}':>10s}  lr of the best and "
        "its ancestors"
    )
    for seed in range(chosen.seeds):
        options = ["--evaluations", str(chosen.evaluations), "--propagators", chosen.propagators]
        line = run_search(seed, chosen.ranks, options)
        rates = [entry["params"]["lr"] for entry in line]
        low = sum(rate < LOW for rate in rates)
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        print(
            f"{seed:4d}{line[-1]['loss']:12.2g}{len(line):7d}{low:10d}  median "
            f"{statistics.median(rates):.2f}: {shown}"
        )


if __name__ == "__main__":
    main()
