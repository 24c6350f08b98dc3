"""Measure the time per evaluation of a run with an objective that takes no time.

The run has 8 ranks in 4 workers. It is compared with Optuna's own loop: 4 processes, one journal,
the default sampler and the same objective. Both are timed from the start of the first evaluation to
the end of the last one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.free import objective, space

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 4


class _SingleRank:
    size = 1


def compute_span(study: optuna.Study) -> float:
    """Return the seconds from the start of the first trial to the end of the last one."""
    ended = [trial for trial in study.trials if trial.datetime_start and trial.datetime_complete]
    first = min(trial.datetime_start for trial in ended if trial.datetime_start)
    return (
        max(trial.datetime_complete for trial in ended if trial.datetime_complete) - first
    ).total_seconds()


def time_run(evaluations: int, propagator: str) -> float:
    """Run run_islands.py with this propagator, and return the milliseconds per evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "mpirun",
            "-n",
            "8",
            sys.executable,
            str(ROOT / "run_islands.py"),
            str(ROOT / "benchmarks/free.py"),
        ]
        command += [
            "--run-dir",
            f"{folder}/run",
            "--evaluations",
            str(evaluations),
            "--propagators",
            propagator,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, timeout=3600)
        name = json.loads(Path(folder, "run", "run.json").read_text())["study"]
        storage = JournalStorage(JournalFileBackend(f"{folder}/run/study.log"))
        return (
            1000 * compute_span(optuna.load_study(study_name=name, storage=storage)) / evaluations
        )


def _run_optuna(path: str, trials: int) -> None:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(study_name="run", storage=JournalStorage(JournalFileBackend(path)))
    for _ in range(trials):
        trial = study.ask(space.make_distributions())
        study.tell(trial, objective(trial.params, _SingleRank()))  # type: ignore[arg-type]


def time_optuna(evaluations: int) -> float:
    """Run Optuna's loop in several processes, and return the milliseconds per trial."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/study.log"
        study = optuna.create_study(
            study_name="run", storage=JournalStorage(JournalFileBackend(path))
        )
        arguments = (path, evaluations // PROCESSES)
        processes = [
            get_context("spawn").Process(target=_run_optuna, args=arguments)
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return 1000 * compute_span(study) / evaluations


def main() -> None:
    """Print the milliseconds per evaluation of this project and of Optuna."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--propagators", nargs="+", default=["ga", "random"])
    parser.add_argument(
        "--most-of-optuna", type=int, default=1000, help="maximum trials of Optuna's loop"
    )
    chosen = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for evaluations in chosen.evaluations:
        parts = [f"{name} {time_run(evaluations, name):.1f}" for name in chosen.propagators]
        if evaluations <= chosen.most_of_optuna:
            parts.append(f"Optuna's loop {time_optuna(evaluations):.1f}")
        print(f"{evaluations} evaluations, ms each: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
