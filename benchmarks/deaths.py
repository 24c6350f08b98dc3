"""The cost of crashes: runs in which every fifth evaluation crashes, compared with runs in which it raises.

python -m benchmarks.deaths --sizes 1 2 3

There are 6 ranks, in workers of each size, and 30 evaluations of two losses. A crash comes after the first loss.
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
WAYS = (
    *("raise", "exit", "segfault", "abort", "kill", "os._exit", "C exit", "C _exit", "overflow", "close", "memory"),
    *("descriptors", "process", "fork", "differ"),
)


def trials_of(folder: Path) -> list[FrozenTrial]:
    """Return the trials of a run in a folder."""
    storage = open_storage(str(folder / "study.log"))
    name = json.loads((folder / "run.json").read_text())["study"]
    return storage.get_all_trials(storage.get_study_id_from_name(name))


def measure(way: str, size: int, evaluations: int, seconds: float) -> tuple[float, float, int]:
    """Return the seconds from the first start to the last end, the longest recovery, and the number of failures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"ways": way, "every": 5, "after": 1, "seconds": seconds / 2, "folder": folder}
        command = ["mpirun", "-n", str(RANKS), sys.executable, str(ROOT / "run_islands.py")]
        command += [str(ROOT / "tests" / "searches" / "dying.py"), "--run-dir", str(folder / "run")]
        command += ["--islands", "1", "--ranks-per-worker", str(size), "--evaluations", str(evaluations)]
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        trials = trials_of(folder / "run")
        assert not any("retry_of" in trial.user_attrs for trial in trials)
        started = min(trial.datetime_start for trial in trials if trial.datetime_start)
        ended = max(trial.datetime_complete for trial in trials if trial.datetime_complete)
        failed = sum("failure" in trial.user_attrs for trial in trials)
        return (ended - started).total_seconds(), max(measure_recovery_times(folder).values()), failed


def main() -> None:
    """Print the seconds of a run with each kind of crash, and their ratio to a run with exceptions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--evaluations", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="that an evaluation takes")
    parser.add_argument("--ways", nargs="+", default=WAYS[1:], choices=WAYS)
    chosen = parser.parse_args()
    for size in chosen.sizes:
        plain = statistics.median(measure("raise", size, chosen.evaluations, chosen.seconds)[0] for _ in range(3))
        print(f"workers of {size}: exceptions {plain:.1f} s", flush=True)
        ratios = []
        for way in chosen.ways:
            if way == "differ" and size == 1:
                continue
            seconds, recovery, failed = measure(way, size, chosen.evaluations, chosen.seconds)
            ratios.append(seconds / plain)
            print(
                f"workers of {size}: {way} {seconds:.1f} s, {ratios[-1]:.2f} times; {failed} failed; "
                f"the next evaluation has started after {recovery:.2f} s at most",
                flush=True,
            )
        print(f"workers of {size}: median ratio {statistics.median(ratios):.2f}, highest {max(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
