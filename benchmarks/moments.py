"""Where the time of a free evaluation goes, on the leader of a worker and on the rank beside it, in microseconds.

    python -m benchmarks.moments

A run of benchmarks/free.py with 8 ranks, in which the functions below are timed, on ranks and in their trainers; each
time is without those of the functions that it calls, and of the functions of this list that are not there, none.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# This file is a search space too: the free one, of which the template times the trainers' steps.
from benchmarks.free import objective, space  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "HPO_MOMENTS"  # the variable that says where times are written
EVERY = 50  # evaluations, after which a trainer writes its times: it is killed when the run has ended
WORKER = 1  # whose ranks are shown
COUNTED = "one evaluation"
RANK_STEPS = {
    "all else of the loop": "hpo.breeding.islands:Archipelago.evolve",
    "breed": "hpo.breeding.propagators:New.__call__",
    "hear what is new": "hpo.store.study_client:Recorder.news",
    "claim": "hpo.store.study_client:Recorder.claim",
    "tell": "hpo.ranks.rpc:Caller.tell",
    "claim from the study": "hpo.store.claims:Claims.claim",
    "read the study's news": "hpo.store.record:Record.news",
    "tell the island": "propulate.propulator:Propulator._evaluate_individual",
    "hear from the island": "propulate.propulator:Propulator._receive_intra_island_individuals",
    "send emigrants": "propulate.pollinator:Pollinator._send_emigrants",
    "receive immigrants": "propulate.pollinator:Pollinator._receive_immigrants",
    "replace individuals": "propulate.pollinator:Pollinator._deactivate_replaced_individuals",
    "tell the other ranks, and wait for the leader": "hpo.evaluation.evaluator:Evaluator.__call__",
    "are the trainers ready": "hpo.evaluation.rank_group:Group.connect",
    COUNTED: "hpo.evaluation.evaluator:Evaluator._evaluate",
    "begin": "hpo.evaluation.supervision:Supervision.begin",
    "wait for the trainer": "hpo.evaluation.trainer_client:Trainer.wait",
    "around each step": "hpo.evaluation.supervision:Supervision.step",
    "agree on a step": "hpo.evaluation.step_sync:Meeting.verdict",
    "decide": "hpo.evaluation.leader:Leader.decide",
    "wait for the objective's end": "hpo.evaluation.supervision:Supervision.end",
    "end": "hpo.evaluation.leader:Leader.finish",
}
TRAINER_STEPS = {
    COUNTED: "hpo.trainer.trainer_server:Trainer._on_evaluate",
    "surroundings": "hpo.trainer.objective_runner:Evaluation.run",
    "seed, and make the worker": "hpo.trainer.trainer_group:Group.worker",
    "the objective": "hpo.trainer.objective_call:Objective.advance",
    "around each step": "hpo.trainer.objective_runner:Evaluation._settle",
    "wait for the verdict": "hpo.trainer.objective_runner:Evaluation._ask",
    "is anything left": "hpo.trainer.trainer_server:Trainer._is_clean",
}


class Clock:
    """Adds up the seconds in each step, without those in other steps that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.count = 0
        self._inner = [0.0]

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and whose time is added up."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter() - began
                self.seconds[step] += taken - self._inner.pop()
                self._inner[-1] += taken
                self.count += step == COUNTED

        return call

    def write(self, path: Path) -> None:
        """Write the microseconds of each step per evaluation."""
        lines = [f"{step}\t{1e6 * seconds / max(1, self.count)}" for step, seconds in self.seconds.items()]
        path.write_text("\n".join(lines))


def wrap(clock: Clock, steps: Mapping[str, str]) -> None:
    """Let all steps be timed that there are."""
    for step, where in steps.items():
        module, _, path = where.partition(":")
        name, _, method = path.partition(".")
        try:
            owner = getattr(importlib.import_module(module), name)
            setattr(owner, method, clock.timed(step, getattr(owner, method)))
        except (ImportError, AttributeError):
            continue


def time_trainers(folder: Path) -> None:
    """Let trainers that are forked from this process write their times."""
    from hpo.trainer.trainer_server import TrainerServer

    clock = Clock()
    wrap(clock, TRAINER_STEPS)
    evaluate = TrainerServer._on_evaluate

    def evaluate_and_write(trainer: TrainerServer, message: Any) -> None:
        evaluate(trainer, message)
        if clock.count % EVERY == 0:
            clock.write(folder / f"trainer-{trainer._group.index}-{trainer._group.rank}")

    TrainerServer._on_evaluate = evaluate_and_write  # type: ignore[assignment, method-assign]


def inside(folder: Path, arguments: list[str]) -> None:
    """Be one rank of the run."""
    clock, rank = Clock(), os.environ.get("PMI_RANK", "0")
    wrap(clock, RANK_STEPS)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        clock.write(folder / f"rank-{rank}")


def print_table(title: str, steps: Mapping[str, str], paths: list[Path]) -> None:
    """Print the times of each step on the leader and beside it."""
    columns = [dict(line.split("\t") for line in path.read_text().splitlines()) for path in paths]
    print(f"{title:46} {'leader':>8} {'beside':>8}")
    for step in steps:
        times = [float(column.get(step, 0.0)) for column in columns]
        if any(times):
            print(f"{step:46} {times[0]:8.0f} {times[1]:8.0f}")
    print(f"{'all':46} {sum(map(float, columns[0].values())):8.0f} {sum(map(float, columns[1].values())):8.0f}")


def main() -> None:
    """Print microseconds per evaluation of one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--propagators", default="random")
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return
    chosen = parser.parse_args()
    if chosen.evaluations < 8 * EVERY:
        parser.error(f"--evaluations must be at least {8 * EVERY}, got {chosen.evaluations}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--evaluations", str(chosen.evaluations), "--propagators", chosen.propagators]
        command = ["mpirun", "-n", "8", sys.executable, "-m", "benchmarks.moments", "--inside", name]
        search = [str(ROOT / "run_islands.py"), __file__, "--run-dir", f"{name}/run"]
        environment = {**os.environ, FOLDER: name}
        subprocess.run(
            [*command, *search, *options], check=True, stdout=subprocess.DEVNULL, env=environment, timeout=3600
        )
        print_table("ranks", RANK_STEPS, [folder / f"rank-{2 * WORKER + rank}" for rank in (0, 1)])
        print_table("their trainers", TRAINER_STEPS, [folder / f"trainer-{WORKER}-{rank}" for rank in (0, 1)])


if __name__ == "__main__":
    main()
elif __name__.startswith("search_file_"):
    time_trainers(Path(os.environ[FOLDER]))
