"""Where the time of a free evaluation goes, on the leader of a worker and on the rank beside it, in microseconds.

    python -m benchmarks.moments

A run of benchmarks/free.py with 8 ranks, in which the functions below are timed; each time is without those of the
functions that it calls, and of the functions of this list that are not there, none.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "all else of the loop": "hpo.breeding.islands:Archipelago.evolve",
    "breed": "hpo.breeding.propagators:New.__call__",
    "hear what is new": "hpo.store.recorder:Recorder.news",
    "claim": "hpo.store.recorder:Recorder.claim",
    "tell": "hpo.ranks.calls:Caller.tell",
    "claim from the study": "hpo.store.claims:Claims.claim",
    "read the study's news": "hpo.store.record:Record.news",
    "tell the island": "propulate.propulator:Propulator._evaluate_individual",
    "hear from the island": "propulate.propulator:Propulator._receive_intra_island_individuals",
    "send emigrants": "propulate.pollinator:Pollinator._send_emigrants",
    "receive immigrants": "propulate.pollinator:Pollinator._receive_immigrants",
    "replace individuals": "propulate.pollinator:Pollinator._deactivate_replaced_individuals",
    "tell the other ranks, and wait for the leader": "hpo.evaluation.evaluator:Evaluator.__call__",
    "is the process group whole": "hpo.evaluation.group:Group.connect",
    "seed, and make the worker": "hpo.evaluation.group:Group.worker",
    "one evaluation's surroundings": "hpo.evaluation.evaluator:Evaluator._evaluate",
    "the objective": "hpo.evaluation.objective:Objective.advance",
    "around each step": "hpo.evaluation.lockstep:Lockstep.step",
    "agree on a step": "hpo.evaluation.meeting:Meeting.verdict",
    "decide": "hpo.evaluation.leader:Leader.decide",
    "end": "hpo.evaluation.leader:Leader.finish",
    "clean up": "hpo.evaluation.evaluator:Evaluator._end",
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
                self.count += step == "one evaluation's surroundings"

        return call


def wrap(clock: Clock) -> None:
    """Let all steps be timed that there are."""
    for step, where in STEPS.items():
        module, _, path = where.partition(":")
        name, _, method = path.partition(".")
        try:
            owner = getattr(importlib.import_module(module), name)
            setattr(owner, method, clock.timed(step, getattr(owner, method)))
        except (ImportError, AttributeError):
            continue


def inside(folder: Path, arguments: list[str]) -> None:
    """Be one rank of the run."""
    clock, rank = Clock(), os.environ.get("PMI_RANK", "0")
    wrap(clock)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        lines = [f"{step}\t{1e6 * seconds / max(1, clock.count)}" for step, seconds in clock.seconds.items()]
        (folder / rank).write_text("\n".join(lines))


def main() -> None:
    """Print microseconds per evaluation of one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--propagators", default="random")
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), sys.argv[3:])
        return
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--evaluations", str(chosen.evaluations), "--propagators", chosen.propagators]
        command = ["mpirun", "-n", "8", sys.executable, "-m", "benchmarks.moments", "--inside", folder]
        search = [str(ROOT / "run_islands.py"), str(ROOT / "benchmarks/free.py"), "--run-dir", f"{folder}/run"]
        subprocess.run([*command, *search, *options], check=True, stdout=subprocess.DEVNULL, timeout=3600)
        ranks = [dict(line.split("\t") for line in Path(folder, rank).read_text().splitlines()) for rank in ("2", "3")]
    print(f"{'':46} {'leader':>8} {'beside':>8}")
    for step in STEPS:
        times = [float(rank.get(step, 0.0)) for rank in ranks]
        if any(times):
            print(f"{step:46} {times[0]:8.0f} {times[1]:8.0f}")
    print(f"{'all':46} {sum(map(float, ranks[0].values())):8.0f} {sum(map(float, ranks[1].values())):8.0f}")


if __name__ == "__main__":
    main()
