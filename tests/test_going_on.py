"""Evaluations that are interrupted, and go on where they were: on real jobs, stopped and killed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from pathlib import Path

import optuna
import pytest

from hpo.store.weights import read_weights
from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.outcome import finished, trials_of
from tests.support.saving import epochs_of, saving
from tests.support.sharing import sharing

START = [{"x": 0.05}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "start.json").write_text(json.dumps(START))
    return tmp_path


def losses_of(trial: optuna.trial.FrozenTrial) -> list[float]:
    return list(trial.intermediate_values.values())


def begun(mpi: Mpi, ranks: int, command: list[object], folder: Path, epochs: int) -> Victim:
    """Start a run, and wait until its first evaluation has so many losses."""
    victim = Victim(mpi, ranks, command, folder, folder / "log")
    run_dir = folder / str(command[command.index("--run-dir") + 1])
    victim.wait_for("done  island")
    while not any(len(trial.intermediate_values) >= epochs for trial in trials_of(run_dir)):
        assert victim.job.poll() is None, victim.log.read_text()
        victim.sleep(0.02)
    return victim


def stop(victim: Victim) -> None:
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")


def assert_same_weights(one: Path, other: Path) -> None:
    weights, expected = read_weights(one / "best.safetensors"), read_weights(other / "best.safetensors")
    assert weights is not None
    assert expected is not None
    assert all(weights.state[name].equal(tensor) for name, tensor in expected.state.items())


@pytest.mark.parametrize("saves", ["state", "leader", "function", "sharded", "report"])
def test_an_evaluation_that_was_stopped_has_the_losses_of_one_that_was_not(mpi: Mpi, folder: Path, saves: str) -> None:
    options = ["--evaluations", 1]
    whole = mpi.run(2, *saving("whole", *options, saves=saves, seconds=0), cwd=folder)
    assert (whole.returncode, whole.stderr) == (0, "")
    (expected,) = trials_of(folder / "whole")
    cut = saving("cut", *options, saves=saves, folder=folder, seconds=0.4)
    stop(begun(mpi, 2, cut, folder, 2))
    assert (folder / "cut" / "states" / "0.safetensors").exists()
    job = mpi.run(2, *cut, "--resume", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, trial = trials_of(folder / "cut")
    assert losses_of(trial) == losses_of(expected)
    # A stop may come while a state is gathered, and on a busy machine, not each is: copies take 1% of the time.
    began, known = trial.user_attrs["went_on_after"], len(interrupted.intermediate_values)
    assert 1 <= began == interrupted.user_attrs["saved_after"] <= known
    assert trial.user_attrs["seconds"] > 0.4 * 6
    epochs = [epoch for _, epoch in epochs_of(folder)]
    assert epochs[-(6 - began) :] == [*range(began + 1, 7)]
    assert all(epochs.count(epoch) == 1 for epoch in range(1, began + 1)), "what was trained is not trained again"
    assert not (folder / "cut" / "states").exists()
    assert_same_weights(folder / "cut", folder / "whole")


def test_a_killed_evaluation_loses_no_more_than_was_asked_for(mpi: Mpi, folder: Path) -> None:
    """Kill all processes, four times in a row, each some epochs later than the last one."""
    options = ["--evaluations", 1, "--save-every", "1s"]
    assert mpi.run(2, *saving("whole", *options, seconds=0, epochs=40), cwd=folder).returncode == 0
    cut = saving("cut", *options, "--resume", folder=folder, seconds=0.15, epochs=40)
    shown = 0
    for _ in range(4):
        victim = begun(mpi, 2, cut, folder, shown + 9)
        victim.kill("all", random.Random(0))
        victim.wait(30)
        shown = max(len(trial.intermediate_values) for trial in trials_of(folder / "cut"))
    job = mpi.run(2, *cut, cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    *_, trial = trials_of(folder / "cut")
    assert losses_of(trial) == losses_of(trials_of(folder / "whole")[0])
    epochs = [epoch for _, epoch in epochs_of(folder)]
    again = len(epochs) - 40
    assert 0 <= again <= 4 * 9, f"{epochs}: in a second there are 7 epochs at most"
    assert epochs.count(1) == 1
    assert_same_weights(folder / "cut", folder / "whole")


@pytest.mark.parametrize(
    ("before", "after", "ranks"), [("replicate", "shard", 3), ("shard", "pipeline", 2), ("pipeline", "replicate", 1)]
)
def test_a_shared_network_goes_on_in_another_way_on_other_ranks(
    mpi: Mpi, tmp_path: Path, before: str, after: str, ranks: int
) -> None:
    """The same batches are statistics of batch normalisation in each way; see `tests.support.sharing`."""
    whole = mpi.run(2, *sharing(before, "--evaluations", 1, epochs=6), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    shutil.move(tmp_path / "run", tmp_path / "whole")
    (expected,) = trials_of(tmp_path / "whole", "run")
    options = ["--evaluations", 1, "--ranks-per-worker"]
    stop(begun(mpi, 2, sharing(before, *options, 2, epochs=6, seconds=0.05), tmp_path, 2))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    job = mpi.run(2, *sharing(before, *options, 2, "--resume", epochs=6), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert losses_of(trials_of(tmp_path / "run")[1]) == losses_of(expected), "to the last digit"
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "again", tmp_path / "run")
    whole_parts = {"accumulate" if after == "pipeline" else "microbatches": 1}
    job = mpi.run(ranks, *sharing(after, *options, ranks, "--resume", epochs=6, **whole_parts), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    _, trial = trials_of(tmp_path / "run")
    assert trial.user_attrs["went_on_after"] >= 1
    assert losses_of(trial) == pytest.approx(losses_of(expected), rel=1e-4)


def test_of_several_trainings_in_an_evaluation_the_first_one_goes_on(mpi: Mpi, tmp_path: Path) -> None:
    command: list[object] = [PROGRAM, SEARCHES / "folds.py", "--run-dir", "run", "--islands", 1, "--evaluations", 1]
    whole = mpi.run(2, *command, cwd=tmp_path)
    assert (whole.returncode, whole.stderr) == (0, "")
    shutil.move(tmp_path / "run", tmp_path / "whole")
    (expected,) = trials_of(tmp_path / "whole", "run")
    assert len(expected.intermediate_values) == 6
    stop(begun(mpi, 2, [*command, "--set", "seconds=0.5"], tmp_path, 5))
    job = mpi.run(2, *command, "--resume", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, trial = trials_of(tmp_path / "run")
    assert trial.params == interrupted.params == expected.params
    assert 1 <= trial.user_attrs["went_on_after"] <= 3, "the second network is trained again"
    assert losses_of(trial) == losses_of(expected)


@pytest.mark.parametrize("what", ["cut", "changed", "another network", "of others"])
def test_a_state_that_does_not_fit_is_a_warning_and_the_evaluation_begins_again(
    mpi: Mpi, folder: Path, what: str
) -> None:
    options = ["--evaluations", 1]
    stop(begun(mpi, 2, saving("cut", *options, seconds=0.3), folder, 2))
    state = folder / "cut" / "states" / "0.safetensors"
    content = bytearray(state.read_bytes())
    if what == "cut":
        state.write_bytes(content[:-7])
    elif what == "changed":
        content[-20] ^= 1
        state.write_bytes(content)
    elif what == "of others":
        state.write_bytes(content.replace(b'"x": 0.05', b'"x": 0.06').replace(b'\\"x\\": 0.05', b'\\"x\\": 0.06'))
    width = 6 if what == "another network" else 5
    job = mpi.run(2, *saving("cut", *options, "--resume", width=width), cwd=folder)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("\n") == 1
    assert "warning: trial 1 begins again, since it cannot go on from its state: " in job.stderr
    expected = {
        "another network": "saving.py:",
        "cut": "cannot be read",
        "changed": "checksum",
        "of others": "checksum",
    }
    assert expected[what] in job.stderr
    assert mpi.run(2, *saving("fresh", *options, width=width), cwd=folder).returncode == 0
    trial = trials_of(folder / "cut")[1]
    assert losses_of(trial) == losses_of(trials_of(folder / "fresh")[0])
    assert "went_on_after" not in trial.user_attrs
    assert not state.parent.exists()


def test_what_cannot_be_saved_fails_its_evaluation_and_says_where(mpi: Mpi, folder: Path) -> None:
    ways = {
        "object": r"TypeError: worker.save takes .*, not the Adam itself: save its state_dict\(\) at \['all'\]\[1\]",
        "function of an object": r"TypeError: .* not the Linear itself: save its state_dict\(\) at \['network'\]",
        "failing function": r"rank 1, saving.py:\d+: ValueError: injected: gathering",
        "one function": r"not all ranks saved a function, .*: rank 0 did not at saving.py:\d+, rank 1 did at .*",
        "late": r"RuntimeError: worker.restored is asked for before the first loss, to go on from",
        "none": "",
    }
    start = [{"x": (number + 0.5) / 10} for number in range(len(ways))]
    (folder / "start.json").write_text(json.dumps(start))
    job = mpi.run(2, *saving("run", "--evaluations", len(ways), saves=",".join(ways), seconds=0), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = trials_of(folder / "run")
    for trial, (way, reason) in zip(trials, ways.items(), strict=True):
        if reason:
            assert trial.state == optuna.trial.TrialState.FAIL, way
            assert re.search(reason, trial.user_attrs["failure"]), trial.user_attrs["failure"]
    assert len(finished(trials)) == 1
    assert not (folder / "run" / "states").exists()


def test_nothing_is_saved_where_nobody_wants_it(mpi: Mpi, folder: Path) -> None:
    options = ["--evaluations", 1, "--save-every", "off"]
    stop(begun(mpi, 2, saving("run", *options, saves="function", seconds=0.3), folder, 2))
    assert not (folder / "run" / "states").exists()
    job = mpi.run(2, *saving("run", *options, "--resume", saves="function"), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert "went_on_after" not in trials_of(folder / "run")[1].user_attrs


def test_a_confirmation_goes_on_too_and_states_of_nobody_are_removed(mpi: Mpi, folder: Path) -> None:
    options = ["--evaluations", 1, "--confirm", 1]
    command = saving("run", *options, seconds=0.3)
    victim = Victim(mpi, 2, command, folder, folder / "log")
    victim.wait_for("confirming the best")
    while len(trials_of(folder / "run", "run-confirm")[0].intermediate_values) < 2:
        victim.sleep(0.05)
    stop(victim)
    states = folder / "run" / "states"
    assert [path.name for path in states.iterdir()] == ["confirm-0.safetensors"]
    shutil.copy(states / "confirm-0.safetensors", states / "3.safetensors")
    shutil.copy(states / "confirm-0.safetensors", states / ".0.safetensors")
    job = mpi.run(2, *command, "--resume", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, trial = trials_of(folder / "run", "run-confirm")
    assert 1 <= trial.user_attrs["went_on_after"] <= len(interrupted.intermediate_values)
    assert len(trial.intermediate_values) == 6
    assert not states.exists()
