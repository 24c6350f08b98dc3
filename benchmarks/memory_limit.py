"""Search hyperparameters of a transformer whose training may need more memory than there is.

    python -m benchmarks.memory_limit --minutes 8 --seeds 0 1 2

Each search runs on 4 ranks until a time limit. The file is also the search: the transformer of
`search_spaces/text_transformer.py` with other sizes. A trainer may allocate `megabytes` more than
at its first evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hpo import Float, Int, Ordinal, SearchSpace, Worker
from hpo.errors import ExitStatus
from hpo.results.reader import RunReader
from hpo.store.evaluations import Evaluation
from hpo.training import TextDataset
from search_spaces import text_transformer

ROOT = Path(__file__).resolve().parents[1]

space = SearchSpace(
    depth=Int(2, 8),
    width=Int(32, 256, step=32),
    batch_size=Ordinal(8, 16, 32, 64, 128, 256),
    dropout=Float(0.0, 0.3),
    lr=Float(1e-4, 3e-2, log=True),
    warmup=Float(0.0, 0.3),
    weight_decay=Float(1e-3, 1.0, log=True),
)


@dataclasses.dataclass(frozen=True)
class Settings(text_transformer.Settings):
    """Settings of the transformer, and the limit of memory."""

    epochs: int = 2
    validation_samples: int = 512
    megabytes: int = 160
    """What a trainer may allocate for networks, gradients and activations."""


def prepare(settings: Settings) -> TextDataset:
    """Load the text."""
    return text_transformer.prepare(settings)


def objective(
    params: Mapping[str, Any], worker: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network. It fails if it needs more memory than the limit."""
    _limit_memory(settings.megabytes)
    settings = dataclasses.replace(settings, batch_size=params["batch_size"])
    yield from text_transformer.objective({**params, "heads": 4}, worker, settings)


@cache  # The limit is relative to the memory at the first evaluation of this process.
def _limit_memory(megabytes: int) -> None:
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"VmData:\s*(\d+) kB", status)
    limit = (int(kilobytes[0]) + 1024 * megabytes) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_search(propagator: str, seed: int, seconds: float) -> list[Evaluation]:
    """Run a search for `seconds`, and return its evaluations that have ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpirun", "-n", "4", sys.executable, "run_islands.py", __file__]
        command += ["--propagators", propagator, "--seed", str(seed), "--run-dir", f"{folder}/run"]
        command += ["--evaluations", "100000", "--time-limit", str(seconds), "--max-failures", "0"]
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=seconds + 300, check=False
        )
        if ended.returncode != ExitStatus.UNFINISHED:
            raise SystemExit(f"{' '.join(command)} ended with status {ended.returncode}")
        return [
            each for each in RunReader(Path(folder, "run")).read_evaluations() if each.is_finished
        ]


def describe(evaluations: Sequence[Evaluation]) -> str:
    """Return the number of evaluations, the share of failures, and the lowest losses."""
    failures = [each.failure or "" for each in evaluations if each.state == "failed"]
    others = sum("can't allocate memory" not in failure for failure in failures)
    in_order = sorted(evaluations, key=lambda each: each.ended)
    half = in_order[: len(in_order) // 2]
    lowest = [min((each.loss for each in part), default=math.inf) for part in (half, in_order)]
    return (
        f"{len(evaluations)} evaluations, {len(failures) / max(1, len(evaluations)):.0%} failed "
        f"({others} of them not for want of memory), lowest loss {lowest[1]:.4f} "
        f"({lowest[0]:.4f} after half of the evaluations)"
    )


def main() -> None:
    """Print a line for each search."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of each search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--propagators", nargs="+", default=["ga", "tpe"])
    chosen = parser.parse_args()
    for seed in chosen.seeds:
        for propagator in chosen.propagators:
            evaluations = run_search(propagator, seed, 60 * chosen.minutes)
            print(f"seed {seed}, {propagator}: {describe(evaluations)}", flush=True)


if __name__ == "__main__":
    main()
