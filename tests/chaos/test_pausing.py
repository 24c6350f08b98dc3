"""Test evaluations that pause at rungs and are promoted later, in MPI jobs that are also killed.

A promoted evaluation continues from its checkpoint.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from hpo.store.trials import is_paused
from hpo.store.weights import read_weights
from tests.searches.saving import Settings, Training, prepare
from tests.support.chaos import Victim
from tests.support.launch import Mpi
from tests.support.run_output import load_trials
from tests.support.saving import make_saving_arguments, read_epochs, read_losses_by_x

XS = [0.31, 0.03, 0.93, 0.11, 0.52, 0.67, 0.98, 0.21, 0.77, 0.42, 0.06, 0.85]
WAYS = ["state", "function", "report"]
EPOCHS = 9
OPTIONS = ["--evaluations", len(XS), "--pruner", "asha"]


def enqueue(folder: Path, xs: Iterable[float]) -> None:
    """Write a file of individuals with these values of x.

    Runs in the folder evaluate them first.
    """
    (folder / "start.json").write_text(json.dumps([{"x": x} for x in xs]))


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, list[float]]:
    """Return the losses of each individual, by its x, if it is trained to the end."""
    folder = tmp_path_factory.mktemp("whole")
    enqueue(folder, XS)
    job = Mpi().run(
        2,
        *make_saving_arguments("whole", "--evaluations", len(XS), epochs=EPOCHS, seconds=0),
        cwd=folder,
    )
    assert (job.returncode, job.stderr) == (0, "")
    return read_losses_by_x(folder / "whole")


@pytest.fixture
def folder(tmp_path: Path, curves: Mapping[float, list[float]]) -> Path:
    """Return a folder in which runs begin with the individual that is best after one epoch.

    A third of the individuals at a rung continue, at least one. So the next best individuals are
    paused at first. They are promoted after worse ones have reached the rung.
    """
    enqueue(tmp_path, sorted(XS, key=lambda x: curves[x][0]))
    return tmp_path


def assert_halved(
    run_dir: Path, curves: Mapping[float, list[float]]
) -> list[optuna.trial.FrozenTrial]:
    """Assert that each individual was trained as far as allowed, with losses of `curves`.

    Return the trials.
    """
    trials = load_trials(run_dir)
    reached: dict[float, int] = {}
    for trial in trials:
        losses = list(trial.intermediate_values.values())
        assert losses == curves[trial.params["x"]][: len(losses)]
        reached[trial.params["x"]] = max(len(losses), reached.get(trial.params["x"], 0))
    assert set(reached) == set(XS)
    at_rung = list(XS)
    for rung, next_rung in ((1, 3), (3, EPOCHS)):
        best = sorted(at_rung, key=lambda x: min(curves[x][:rung]))[: max(1, len(at_rung) // 3)]
        assert all(reached[x] >= next_rung for x in best), (
            f"{reached}: after {rung} epochs, {best} are the best"
        )
        assert all(reached[x] in (rung, next_rung, EPOCHS) for x in at_rung)
        at_rung = [x for x in at_rung if reached[x] > rung]
    # The last trial of each individual.
    states = {trial.params["x"]: trial.state.name for trial in trials}
    assert all((states[x] == "COMPLETE") is (epochs == EPOCHS) for x, epochs in reached.items())
    return trials


def test_best_of_each_rung_resume_from_pause(
    mpi: Mpi, folder: Path, curves: Mapping[float, list[float]]
) -> None:
    command = make_saving_arguments(
        "run", *OPTIONS, saves=",".join(WAYS), epochs=EPOCHS, seconds=0, folder=folder
    )
    job = mpi.run(2, *command, cwd=folder)  # With one worker, promotions do not depend on timing.
    assert (job.returncode, job.stderr) == (0, "")
    trials = assert_halved(folder / "run", curves)
    promoted = [trial for trial in trials if "retry_of" in trial.user_attrs]
    assert {int(trial.params["x"] * 10) % len(WAYS) for trial in promoted} == {0, 1, 2}, (
        "each way to save"
    )
    for trial in promoted:
        paused = trials[trial.user_attrs["retry_of"]]
        assert paused.state.name == "PRUNED"
        assert trial.user_attrs["resumed_from_step"] == paused.user_attrs["paused_after"]
        assert trial.user_attrs["seconds_before"] > 0
    assert max(Counter(read_epochs(folder)).values()) == 1, "no epoch was trained twice"
    assert not (folder / "run" / "checkpoints").exists()
    summary = json.loads((folder / "run" / "summary.json").read_text())
    counts = summary["evaluations"]
    assert counts["complete"] + counts["paused"] == len(XS)
    assert [rung["epochs"] for rung in summary["rungs"]] == [1, 3]
    assert summary["rungs"][0]["reached"] == len(XS)
    assert f"{counts['complete']} complete, {counts['paused']} not promoted, of 12" in job.stdout
    assert "next promotion" not in job.stdout
    assert [rung["next"] for rung in summary["rungs"]] == [None, None]
    assert 0 < summary["worker_busy_fraction"] <= 1
    best = read_weights(folder / "run" / "best.safetensors")
    assert best is not None
    assert best.params == summary["best"]["params"]


def test_promoted_evaluation_keeps_weights_of_best_loss(mpi: Mpi, tmp_path: Path) -> None:
    """The run's best loss is from before a pause.

    This happens only if a better individual at the rung has failed.
    """
    xs = [0.85, 0.15, 0.14, 0.13, 0.12, 0.11]  # The best is first.
    enqueue(tmp_path, xs)
    options = ["--evaluations", len(xs), "--pruner", "asha", "--ranks-per-worker", 1]
    settings = {
        "saves": "first,second",
        "epochs": EPOCHS,
        "best": 1,
        "seconds": 0,
        "folder": tmp_path,
    }
    victim = Victim(
        mpi, 2, make_saving_arguments("run", *options, **settings), tmp_path, tmp_path / "log"
    )
    victim.wait_for("done  island")
    while not any(map(is_paused, load_trials(tmp_path / "run"))):
        assert victim.job.poll() is None, victim.log.read_text()
        victim.sleep(0.05)
    (tmp_path / "paused").touch()
    assert victim.wait(60) == (0, "")
    failed, paused, *others = load_trials(tmp_path / "run")
    (promoted,) = [trial for trial in others if trial.user_attrs.get("retry_of") == paused.number]
    assert "ValueError: injected" in failed.user_attrs["failure"]
    assert promoted.params == paused.params == {"x": xs[1]}
    assert (promoted.user_attrs["resumed_from_step"], len(promoted.intermediate_values)) == (
        1,
        EPOCHS,
    )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.trial == promoted.number
    torch.manual_seed(0)
    data = prepare(Settings())  # type: ignore[no-untyped-call]
    training: Any = Training(promoted.params, SimpleNamespace(data=data, seed=0))  # type: ignore[no-untyped-call]
    assert training.epoch() == pytest.approx(promoted.values[0], rel=1e-5)
    for name, tensor in training.network.state_dict().items():
        assert tensor.numpy() == pytest.approx(weights.state[name].numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("saves", "options"), [("nothing", []), ("state", ["--checkpoint-every", "off"])]
)
def test_evaluations_without_checkpoint_are_pruned(
    mpi: Mpi, tmp_path: Path, saves: str, options: list[object]
) -> None:
    enqueue(tmp_path, XS)
    command = make_saving_arguments(
        "run", *OPTIONS, *options, saves=saves, epochs=EPOCHS, seconds=0
    )
    job = mpi.run(2, *command, "--ranks-per-worker", 1, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert len(trials) == len(XS)
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert 0 < len(pruned) < len(XS)
    assert all("paused_after" not in trial.user_attrs for trial in pruned)
    ends = Counter(len(trial.intermediate_values) for trial in pruned)
    assert set(ends) <= {1, 3, EPOCHS}
    assert ends[EPOCHS] <= 1, (
        "one of two workers may reach the end before the rung has enough losses"
    )


def test_run_with_pauses_resumes_after_stop_and_kill(
    mpi: Mpi, folder: Path, curves: Mapping[float, list[float]]
) -> None:
    command = make_saving_arguments(
        "run", *OPTIONS, "--resume", "--checkpoint-every", "1s", epochs=EPOCHS, seconds=0.3
    )
    for ranks, end in ((4, signal.SIGUSR1), (2, signal.SIGKILL)):
        victim = Victim(mpi, ranks, command, folder, folder / f"log{ranks}")
        known = len(load_trials(folder / "run")) if (folder / "run" / "study.log").exists() else 0
        victim.wait_for("done  island")
        while len(trials := load_trials(folder / "run")) < known + 1 or not any(
            map(is_paused, trials)
        ):
            assert victim.job.poll() is None, victim.log.read_text()
            victim.sleep(0.05)
        if end == signal.SIGUSR1:
            victim.job.send_signal(end)
        else:
            victim.kill("all", random.Random(0))
        victim.wait(30)
        assert any((folder / "run" / "checkpoints").glob("*.safetensors")), (
            "paused evaluations keep their checkpoints"
        )
    job = mpi.run(1, *command, "--set", "seconds=0", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = assert_halved(folder / "run", curves)
    assert any(
        "retry_of" in t.user_attrs and t.user_attrs.get("resumed_from_step", 0) > 0 for t in trials
    )
    assert not (folder / "run" / "checkpoints").exists()


def test_promoted_evaluation_without_checkpoint_restarts(
    mpi: Mpi, folder: Path, curves: Mapping[float, list[float]]
) -> None:
    few = ["--evaluations", 5, "--pruner", "asha"]  # Only the first one is promoted.
    job = mpi.run(1, *make_saving_arguments("run", *few, epochs=EPOCHS, seconds=0), cwd=folder)
    assert job.returncode == 0, job.stderr
    assert not (folder / "run" / "checkpoints").exists(), "the run has ended"
    more = make_saving_arguments("run", *OPTIONS, "--resume", epochs=EPOCHS, seconds=0)
    job = mpi.run(1, *more, cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = assert_halved(folder / "run", curves)
    assert any(
        "retry_of" in trial.user_attrs and "resumed_from_step" not in trial.user_attrs
        for trial in trials
    )
