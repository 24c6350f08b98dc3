"""Measure the microseconds of each stage of an evaluation without training, on both ranks.

    python -m benchmarks.stages

The script runs benchmarks/free.py with 8 ranks. It times the functions that are listed below, on
ranks and in trainers. The time of a function excludes listed functions that it calls. Functions
that do not exist are skipped.
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

# This file is also a search file: that of benchmarks/free.py. The template times the stages of
# trainers.
from benchmarks.free import objective, space  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "HPO_STAGES"  # Environment variable with the folder of the times.
# Evaluations after which a trainer writes its times. It is killed at the end of the run.
EVERY = 50
WORKER = 1  # Index of the worker whose ranks are shown.
COUNTED = "one evaluation"
RANK_STAGES = {
    "rest of the loop": "hpo.breeding.islands:IslandWorker.run",
    "breed": "hpo.breeding.propagators:Propagator.ask",
    "receive updates": "hpo.store.study_client:StudyClient.read_changes",
    "claim": "hpo.store.study_client:StudyClient.claim",
    "send": "hpo.ranks.rpc:RpcClient.notify",
    "claim from the study": "hpo.store.study_writer:Claims.claim",
    "read updates of the study": "hpo.store.changes:ChangeLog.update",
    "exchange with other islands": "hpo.breeding.propulate_compat:Exchange.migrate",
    "send emigrants": "propulate.pollinator:Pollinator._send_emigrants",
    "receive immigrants": "propulate.pollinator:Pollinator._receive_immigrants",
    "replace individuals": "propulate.pollinator:Pollinator._deactivate_replaced_individuals",
    "broadcast, and wait for the leader": "hpo.evaluation.evaluator:Evaluator.follow",
    "check that trainers are ready": "hpo.evaluation.rank_group:RankGroup.connect",
    COUNTED: "hpo.evaluation.evaluator:Evaluator._run_attempt",
    "begin": "hpo.evaluation.supervision:Supervision.start_objective",
    "wait for the trainer": "hpo.evaluation.trainer_client:TrainerClient.wait",
    "supervise": "hpo.evaluation.supervision:Supervision.supervise",
    "gather the ends of all ranks": "hpo.evaluation.supervision:Supervision._gather_ends",
    "answer a report": "hpo.evaluation.supervision:Supervision._answer_report",
    "decide": "hpo.evaluation.leader:Leader.decide",
    "wait for the objective's end": "hpo.evaluation.supervision:Supervision._finish",
    "end": "hpo.evaluation.leader:Leader.finish_evaluation",
}
TRAINER_STAGES = {
    COUNTED: "hpo.trainer.trainer_server:TrainerServer._on_evaluate",
    "surroundings": "hpo.trainer.objective_runner:ObjectiveRunner.run",
    "seed, and make the worker": "hpo.trainer.trainer_group:TrainerGroup.make_worker",
    "the objective": "hpo.trainer.objective_runner:ObjectiveCall.advance_to_loss",
    "around each report": "hpo.trainer.objective_runner:ObjectiveRunner._agree_on_report",
    "wait for the reports of other ranks": "hpo.trainer.report_exchange:ReportExchange.collect",
    "wait for the answer": "hpo.trainer.objective_runner:ObjectiveRunner._receive_answer",
    "wait for the answer from rank 0": "hpo.trainer.report_exchange:ReportExchange.broadcast",
    "check that the trainer is clean": "hpo.trainer.trainer_server:TrainerServer._is_clean",
}


class Clock:
    """Adds up the seconds of each stage. The time of a stage excludes the stages that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.count = 0
        self._inner = [0.0]

    def add_timer(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds its time to the stage."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter() - began
                self.seconds[stage] += taken - self._inner.pop()
                self._inner[-1] += taken
                self.count += stage == COUNTED

        return call

    def write(self, path: Path) -> None:
        """Write the microseconds of each stage, divided by the number of evaluations."""
        lines = [
            f"{stage}\t{1e6 * seconds / max(1, self.count)}"
            for stage, seconds in self.seconds.items()
        ]
        path.write_text("\n".join(lines))


def time_stages(clock: Clock, stages: Mapping[str, str]) -> None:
    """Replace the function of each stage, such as "module:Class.method", by a timed one.

    Skip missing functions.
    """
    for stage, where in stages.items():
        module, _, path = where.partition(":")
        name, _, method = path.partition(".")
        try:
            owner = getattr(importlib.import_module(module), name)
            setattr(owner, method, clock.add_timer(stage, getattr(owner, method)))
        except (ImportError, AttributeError):
            continue


def time_trainers(folder: Path) -> None:
    """Time the stages of the trainers that are forked from this process."""
    from hpo.trainer.trainer_server import TrainerServer

    clock = Clock()
    time_stages(clock, TRAINER_STAGES)
    evaluate = TrainerServer._on_evaluate

    def evaluate_and_write(trainer: TrainerServer, message: Any) -> None:
        evaluate(trainer, message)
        if clock.count % EVERY == 0:
            clock.write(folder / f"trainer-{trainer._group.index}-{trainer._group.rank}")

    TrainerServer._on_evaluate = evaluate_and_write  # type: ignore[assignment, method-assign]


def run_rank(folder: Path, arguments: list[str]) -> None:
    """Run run_islands.py as one rank, and write the times of its stages."""
    clock, rank = Clock(), os.environ.get("PMI_RANK", "0")
    time_stages(clock, RANK_STAGES)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        clock.write(folder / f"rank-{rank}")


def print_table(title: str, stages: Mapping[str, str], paths: list[Path]) -> None:
    """Print the times of each stage on the leader and on its other rank."""
    columns = [dict(line.split("\t") for line in path.read_text().splitlines()) for path in paths]
    print(f"{title:46} {'leader':>8} {'other':>8}")
    for stage in stages:
        times = [float(column.get(stage, 0.0)) for column in columns]
        if any(times):
            print(f"{stage:46} {times[0]:8.0f} {times[1]:8.0f}")
    print(
        f"{'all':46} {sum(map(float, columns[0].values())):8.0f} "
        f"{sum(map(float, columns[1].values())):8.0f}"
    )


def main() -> None:
    """Print microseconds per evaluation of one worker."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--propagators", default="random")
    if sys.argv[1:2] == ["--run-rank"]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
        return
    chosen = parser.parse_args()
    if chosen.evaluations < 8 * EVERY:
        parser.error(f"--evaluations must be at least {8 * EVERY}, got {chosen.evaluations}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--evaluations", str(chosen.evaluations), "--propagators", chosen.propagators]
        command = [
            "mpirun",
            "-n",
            "8",
            sys.executable,
            "-m",
            "benchmarks.stages",
            "--run-rank",
            name,
        ]
        search = [str(ROOT / "run_islands.py"), __file__, "--run-dir", f"{name}/run"]
        environment = {**os.environ, FOLDER: name}
        subprocess.run(
            [*command, *search, *options],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment,
            timeout=3600,
        )
        print_table("ranks", RANK_STAGES, [folder / f"rank-{2 * WORKER + rank}" for rank in (0, 1)])
        print_table(
            "their trainers",
            TRAINER_STAGES,
            [folder / f"trainer-{WORKER}-{rank}" for rank in (0, 1)],
        )


if __name__ == "__main__":
    main()
elif __name__.startswith("search_file_"):
    time_trainers(Path(os.environ[FOLDER]))
