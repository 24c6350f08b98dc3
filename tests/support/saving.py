"""Run tests/searches/saving.py, kill the run repeatedly, and resume its evaluations."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials

SAVING = SEARCHES / "saving.py"


def make_saving_arguments(run_dir: str, *options: object, **settings: object) -> list[object]:
    """Return the arguments of a run with saving.py on one island.

    The run first evaluates the hyperparameters in start.json.
    """
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    return [
        PROGRAM,
        SAVING,
        "--islands",
        1,
        "--run-dir",
        run_dir,
        "--enqueue",
        "start.json",
        *options,
        *chosen,
    ]


def read_epochs(folder: Path) -> list[tuple[float, int]]:
    """Return the trained epochs in order, as pairs of the hyperparameter `x` and the epoch."""
    lines = (json.loads(line) for line in (folder / "epochs").read_text().splitlines())
    return [(x, epoch) for _, x, epoch in lines]


def read_losses_by_x(run_dir: Path) -> dict[float, list[float]]:
    """Return all losses of each complete evaluation by its hyperparameter `x`."""
    complete = [trial for trial in load_trials(run_dir) if trial.values]
    return {trial.params["x"]: list(trial.intermediate_values.values()) for trial in complete}


@dataclass(frozen=True)
class Survival:
    """Numbers of kills, of different trained epochs, and of epochs trained again."""

    kills: int
    epochs: int
    again: int
    given_up: int
    """Number of evaluations that failed since the job was killed thrice before they progressed."""


def kill_and_resume(mpi: Mpi, folder: Path, chance: random.Random, kills: int) -> Survival:
    """Kill a run at random moments, resume it, and compare its losses with a whole run.

    The run has 12 evaluations on 2 workers of 2 ranks.
    """
    folder.mkdir()
    start = [{"x": round(0.04 + 0.08 * number, 2)} for number in range(12)]
    (folder / "start.json").write_text(json.dumps(start))
    options = ["--evaluations", 12, "--checkpoint-every", "1s", "--resume"]
    whole = mpi.run(
        4, *make_saving_arguments("whole", *options, seconds=0, epochs=80), cwd=folder, timeout=300
    )
    assert whole.returncode == 0, whole.stderr
    command = make_saving_arguments("run", *options, seconds=0.2, epochs=80, folder=folder)
    for kill in range(kills):
        victim = Victim(mpi, 4, command, folder, folder / f"log{kill}")
        if victim.wait_for("done  island"):
            victim.sleep(chance.uniform(0.0, 6.0))
        if victim.job.poll() == 0:
            kills = kill
            break
        victim.kill(chance.choice(["rank", "mpirun", "all"]), chance)
        victim.wait(60)
    last = mpi.run(4, *command, cwd=folder, timeout=300)
    assert last.returncode == 0, last.stderr
    failures = {
        trial.params["x"]: trial.user_attrs["failure"]
        for trial in load_trials(folder / "run")
        if trial.user_attrs.get("failure") not in (None, "interrupted")
    }
    assert all("the job crashed 3 times" in failure for failure in failures.values()), failures
    assert len(failures) <= 6, failures
    losses = read_losses_by_x(folder / "whole")
    expected = {x: of_x for x, of_x in losses.items() if x not in failures}
    assert read_losses_by_x(folder / "run") == expected
    trained = Counter(read_epochs(folder))
    assert len(trained) >= len(expected) * 80
    return Survival(kills, len(trained), trained.total() - len(trained), len(failures))
