"""Measure the time from the start of mpirun to the first training step of the last worker.

python benchmarks/startup.py --ranks 8 32
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo import Float, SearchSpace

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

ROOT = Path(__file__).resolve().parents[1]

# This file is also a search file: an evaluation takes one step of the reference network and writes
# the time.
space = SearchSpace(lr=Float(0.1, 1.0))


@dataclass(frozen=True)
class Settings:
    """Settings of this search: the folder to which the times are written."""

    folder: str = ""


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[float]:
    """Take one training step, and write the time to a file."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    network = nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(640, 10)
    )
    model = DistributedDataParallel(network.to(worker.device))
    optimizer = torch.optim.Adadelta(network.parameters(), lr=params["lr"])
    loss = model(torch.rand(32, 1, 8, 8, device=worker.device)).square().mean()
    loss.backward()
    optimizer.step()
    Path(settings.folder, f"{worker.index}-{worker.rank}").write_text(str(time.time()))
    yield loss.item()


def time_start(ranks: int) -> float:
    """Start a run. Return the seconds until every worker has taken its first training step."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--evaluations",
            str(ranks // 2),
            "--set",
            f"folder={folder}",
            "--run-dir",
            f"{folder}/run",
        ]
        started = time.time()
        command = [
            "mpirun",
            "-n",
            str(ranks),
            sys.executable,
            str(ROOT / "run_islands.py"),
            __file__,
            *options,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        return max(float(path.read_text()) for path in Path(folder).glob("*-?")) - started


def main() -> None:
    """Print the seconds to the first step of each run, and their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        measured = []
        for number in range(1, chosen.repeat + 1):
            measured.append(time_start(ranks))
            print(f"{ranks} ranks, run {number}: first step after {measured[-1]:.1f} s", flush=True)
        print(f"{ranks} ranks: median {statistics.median(measured):.1f} s", flush=True)


if __name__ == "__main__":
    main()
