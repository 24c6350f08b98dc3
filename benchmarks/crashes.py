"""Measure how much longer a run takes if evaluations crash instead of raising exceptions.

python -m benchmarks.crashes --sizes 1 2 3

A run has 6 ranks, in workers of the given size. It has 30 evaluations with two losses each. Every
fifth evaluation fails after its first loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from optuna.trial import FrozenTrial

from hpo.store.storage import open_storage
from tests.support.crashes import measure_recovery_times

ROOT = Path(__file__).resolve().parents[1]
RANKS = 6
CRASHES = (
    *(
        "raise",
        "exit",
        "segfault",
        "abort",
        "kill",
        "os._exit",
        "C exit",
        "C _exit",
        "overflow",
        "close",
        "memory",
    ),
    *("descriptors", "process", "fork", "differ"),
)


def read_trials(folder: Path) -> list[FrozenTrial]:
    """Read the trials of the run in a folder."""
    storage = open_storage(str(folder / "study.log"))
    name = json.loads((folder / "run.json").read_text())["study"]
    return storage.get_all_trials(storage.get_study_id_from_name(name))


def measure(crash: str, size: int, evaluations: int, seconds: float) -> tuple[float, float, int]:
    """Run a search in which every fifth evaluation fails, and measure it.

    Args:
        crash: Kind of failure, from `CRASHES`.
        size: Ranks per worker.
        evaluations: Number of evaluations.
        seconds: Duration of an evaluation without a failure.

    Returns:
        The seconds from the first start to the last end of an evaluation; the most seconds from a
        failure to the next start; and the number of failed evaluations.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"ways": crash, "every": 5, "after": 1, "seconds": seconds / 2, "folder": folder}
        command = ["mpirun", "-n", str(RANKS), sys.executable, str(ROOT / "run_islands.py")]
        command += [str(ROOT / "tests" / "searches" / "dying.py"), "--run-dir", str(folder / "run")]
        command += [
            "--islands",
            "1",
            "--ranks-per-worker",
            str(size),
            "--evaluations",
            str(evaluations),
        ]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        trials = read_trials(folder / "run")
        assert not any("retry_of" in trial.user_attrs for trial in trials)
        started = min(trial.datetime_start for trial in trials if trial.datetime_start)
        ended = max(trial.datetime_complete for trial in trials if trial.datetime_complete)
        failed = sum("failure" in trial.user_attrs for trial in trials)
        return (
            (ended - started).total_seconds(),
            max(measure_recovery_times(folder).values()),
            failed,
        )


def main() -> None:
    """Print the seconds of a run for each kind of crash, relative to those with exceptions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--evaluations", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of an evaluation")
    parser.add_argument("--crashes", nargs="+", default=CRASHES[1:], choices=CRASHES)
    chosen = parser.parse_args()
    for size in chosen.sizes:
        plain = statistics.median(
            measure("raise", size, chosen.evaluations, chosen.seconds)[0] for _ in range(3)
        )
        print(f"workers of {size}: exceptions {plain:.1f} s", flush=True)
        ratios = []
        for crash in chosen.crashes:
            if crash == "differ" and size == 1:
                continue
            seconds, recovery, failed = measure(crash, size, chosen.evaluations, chosen.seconds)
            ratios.append(seconds / plain)
            print(
                f"workers of {size}: {crash} {seconds:.1f} s, {ratios[-1]:.2f} times; "
                f"{failed} failed; the next evaluation started after at most {recovery:.2f} s",
                flush=True,
            )
        print(
            f"workers of {size}: median ratio {statistics.median(ratios):.2f}, "
            f"highest {max(ratios):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
