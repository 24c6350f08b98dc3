"""Measure the time to reach a loss in real runs, with each pruner and with PBT.

    python -m benchmarks.pruning search_spaces/digits_cnn.py --losses 0.1 0.08 0.07 --set epochs=27
    --set patience=99

Runs end at a time limit. The study of a run has the times at which its trials ended, and their
losses. The suffix "-stopping" of a pruner disables checkpoints, so that the pruner stops
evaluations instead of pausing them. "pbt:2" means `--pbt` with evaluations of 2 epochs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

ROOT = Path(__file__).resolve().parents[1]
MORE_TO_DO = 75  # Exit status of a run that can be resumed.
_STOPPING = "-stopping"


def run_search(search: list[str], pruner: str, seed: int, seconds: float) -> list[FrozenTrial]:
    """Run a search on 8 ranks for `seconds`, and return the trials that ended with a loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "mpirun",
            "-n",
            "8",
            sys.executable,
            str(ROOT / "run_islands.py"),
            *search,
            "--seed",
            str(seed),
        ]
        command += [
            "--run-dir",
            f"{folder}/run",
            "--evaluations",
            "100000",
            "--time-limit",
            str(seconds),
        ]
        name, _, epochs = pruner.removesuffix(_STOPPING).partition(":")
        command += ["--pbt", "--set", f"epochs={epochs}"] if name == "pbt" else ["--pruner", name]
        command += ["--checkpoint-every", "off"] if pruner.endswith(_STOPPING) else []
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=seconds + 120, check=False
        )
        if ended.returncode != MORE_TO_DO:
            raise SystemExit(f"{' '.join(command)} ended with status {ended.returncode}")
        storage = JournalStorage(JournalFileBackend(f"{folder}/run/study.log"))
        trials = optuna.load_study(study_name="run", storage=storage).trials
    return [trial for trial in trials if trial.values]


def compute_seconds_to(loss: float, trials: list[FrozenTrial]) -> float:
    """Return the seconds until the first complete trial with at most this loss; infinity if none.

    The time is counted from the start of the first trial.
    """
    began = min(trial.datetime_start for trial in trials if trial.datetime_start)
    ends = [
        trial.datetime_complete for trial in _select_complete(trials) if trial.values[0] <= loss
    ]
    return min(((end - began).total_seconds() for end in ends if end), default=math.inf)


def _select_complete(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state == TrialState.COMPLETE]


def main() -> None:
    """Print the median times over the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "search", type=Path, nargs="?", default=ROOT / "search_spaces" / "digits_cnn.py"
    )
    parser.add_argument(
        "--pruners",
        nargs="+",
        default=["none", "median", "asha-stopping", "asha", "hyperband", "pbt:2"],
    )
    parser.add_argument("--losses", type=float, nargs="+", default=[0.1, 0.07, 0.05])
    parser.add_argument(
        "--seconds", type=float, default=80.0, help="time limit of each run, with start-up"
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the search"
    )
    chosen = parser.parse_args()
    search = [str(chosen.search), *(word for text in chosen.set for word in ("--set", text))]
    runs: dict[str, list[list[FrozenTrial]]] = {pruner: [] for pruner in chosen.pruners}
    for seed in range(chosen.seeds):
        for pruner, found in runs.items():
            found.append(run_search(search, pruner, seed, chosen.seconds))
            complete = _select_complete(found[-1])
            best = min((trial.values[0] for trial in complete), default=math.inf)
            print(
                f"seed {seed}, {pruner}: {len(found[-1])} ended, {len(complete)} complete, "
                f"{best:.4f}",
                flush=True,
            )
    print(
        f"\n{'pruner':16s}evaluations  best"
        + "".join(f"{f'seconds to {loss:g}':>20s}" for loss in chosen.losses)
    )
    for pruner, found in runs.items():
        best = statistics.mean(
            min((t.values[0] for t in _select_complete(trials)), default=math.inf)
            for trials in found
        )
        cells = ""
        for loss in chosen.losses:
            times = [compute_seconds_to(loss, trials) for trials in found]
            cells += (
                f"{statistics.median(times):12.1f} ({sum(map(math.isfinite, times))}/{len(times)})"
            )
        print(f"{pruner:16s}{statistics.mean(map(len, found)):11.0f}{best:8.4f}{cells}")


if __name__ == "__main__":
    main()
