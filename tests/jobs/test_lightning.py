"""Test searches whose networks are trained by Lightning.

They are recorded, pruned and stopped, and fail, as others do.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpo.store.weights import read_weights
from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

LIT = SEARCHES / "lit.py"


def lit(folder: Path, ways: str, *options: object) -> list[object]:
    settings = ["--set", f"ways={ways}", "--set", f"folder={folder}"]
    return [PROGRAM, LIT, "--islands", 1, "--run-dir", "run", *settings, *options]


def notes_of(folder: Path, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"0-{rank}").read_text().splitlines()]


@pytest.mark.parametrize(("size", "way"), [(1, "none"), (3, "none"), (2, "sharded"), (2, "plain")])
def test_lightning_trainer_reports_after_each_validation(
    mpi: Mpi, tmp_path: Path, size: int, way: str
) -> None:
    job = mpi.run(
        size, *lit(tmp_path, way, "--evaluations", 4, "--ranks-per-worker", size), cwd=tmp_path
    )
    assert job.returncode == 0, job.stderr
    if way != "plain":
        assert job.stderr == "", "no tips, no warnings, no progress bars"
        assert " | " not in job.stdout
    trials = load_trials(tmp_path / "run")
    assert len(find_complete_losses(trials)) == 4
    for trial in trials:
        steps = [trial.params["x"] * 0.8**epoch for epoch in (1, 2, 3)]
        assert list(trial.intermediate_values.values()) == pytest.approx(steps, rel=1e-5)
        assert trial.user_attrs["metrics"] == {"epochs": 2.0}
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["layer.weight"].item() == pytest.approx(
        min(find_complete_losses(trials).values()), rel=1e-5
    )
    for rank in range(size):
        notes = notes_of(tmp_path, rank)
        assert [note[1:3] for note in notes] == [["4", "nothing"]] * 4, "the last one validates"
        # A trainer in which something is left is replaced, here for the process groups of
        # Lightning's device mesh.
        assert len({note[4] for note in notes}) == (4 if way == "sharded" else 1)
    names = [*(f"0-{rank}" for rank in range(size)), "0-numbers", "run"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_lightning_failure_in_a_fit_fails_one_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    reasons = {
        "raises": r"rank 1, lit\.py:\d+: ValueError: injected",
        "nan": r"rank [01], lit\.py:\d+: ValueError: the validation loss is nan",
        "unsynced": r"the ranks yielded different losses: rank 0 \S+ at lit\.py:\d+, rank 1 .*",
        "monitor": (
            r"rank \d, lit\.py:\d+: ValueError: monitor must be .* \(epochs, val_loss\), got "
            r"'loss'\. .*"
        ),
        "devices": r"rank \d, lit\.py:\d+: ValueError: devices must be omitted, got 2\. .*",
        "fabric": r"rank \d, lit\.py:\d+: ValueError: num_nodes must be omitted, got 2\. .*",
        "sleeps": (
            r"timeout: not finished within --evaluation-timeout; rank 0 was at lit\.py:\d+, .*"
        ),
    }
    ways = ",".join([*reasons, "none"])
    limits = ["--evaluation-timeout", 8, "--collective-timeout", 4]
    job = mpi.run(2, *lit(tmp_path, ways, "--evaluations", len(reasons) + 1, *limits), cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    *failures, well = load_trials(tmp_path / "run")
    for (way, reason), failed in zip(reasons.items(), failures, strict=True):
        assert re.fullmatch(reason, failed.user_attrs["failure"]), (
            f"{way}: {failed.user_attrs['failure']}"
        )
    assert well.state.name == "COMPLETE"


def test_lightning_fit_that_is_pruned_ends_on_all_ranks(mpi: Mpi, tmp_path: Path) -> None:
    options = [
        "--evaluations",
        24,
        "--pruner",
        "percentile:25",
        "--propagators",
        "random",
        "--set",
        "epochs=4",
    ]
    job = mpi.run(2, *lit(tmp_path, "none", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    states = [trial.state.name for trial in trials]
    assert 4 <= states.count("PRUNED") < 24
    assert set(states) == {"PRUNED", "COMPLETE"}
    for rank in range(2):
        for trial, (x, seen, ended_by, *_) in zip(trials, notes_of(tmp_path, rank), strict=True):
            assert float(x) == trial.params["x"]
            epochs = len(trial.intermediate_values)
            if trial.state.name == "PRUNED":
                assert (int(seen), ended_by) == (epochs - 1, "Cancelled"), (
                    "what comes behind the report is left out"
                )
            else:
                assert (int(seen), ended_by) == (5, "nothing")


def test_lightning_run_stops_cleanly_on_a_signal(mpi: Mpi, tmp_path: Path) -> None:
    arguments = lit(tmp_path, "none", "--evaluations", 40, "--set", "epochs=100000")
    victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while not any(trial.intermediate_values for trial in load_trials(tmp_path / "run")):
        victim.sleep(0.2)
    asked = time.monotonic()
    victim.job.send_signal(signal.SIGTERM)  # of which Lightning has a handler of its own
    assert victim.wait(30) == (75, "")
    assert time.monotonic() - asked < scale(10)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["waiting"] == 1


@pytest.mark.slow
def test_lightning_module_without_lightning_names_the_extra() -> None:
    program = (
        "import sys, hpo.training, hpo.cli, hpo.trainer.trainer_server\n"
        "assert 'lightning' not in sys.modules\n"
        "sys.modules['lightning'] = None\n"
        "import hpo.training.lightning\n"
    )
    job = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=scale(60),
    )
    assert job.returncode == 1
    last = job.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: hpo.training.lightning needs Lightning (")
    assert last.endswith("pip install 'hpo-islands[lightning]'")
