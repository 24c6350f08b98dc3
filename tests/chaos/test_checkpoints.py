"""Test evaluations that resume from checkpoints, in MPI jobs that are stopped or killed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import optuna
import pytest

from hpo.results.reader import RunReader
from hpo.results.summary import compute_busy_fraction
from hpo.store.weights import read_weights
from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials
from tests.support.saving import make_saving_arguments, read_epochs
from tests.support.sharing import make_sharing_arguments

WAYS = ["state", "leader", "function", "sharded", "report"]
XS = [0.05, 0.15, 0.25, 0.35, 0.45]  # one individual for each way
EPOCHS, BEST = 40, 2


def enqueue(folder: Path, *xs: float) -> None:
    """Write a file of individuals with these values of x.

    Runs in the folder evaluate them first.
    """
    (folder / "start.json").write_text(json.dumps([{"x": x} for x in xs]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    enqueue(tmp_path, XS[0])
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run, in which each evaluation saves checkpoints in another way.

    The losses rise after epoch `BEST`.
    """
    folder = tmp_path_factory.mktemp("whole")
    enqueue(folder, *XS)
    settings = {"saves": ",".join(WAYS), "seconds": 0, "epochs": EPOCHS, "best": BEST}
    job = Mpi().run(
        2, *make_saving_arguments("whole", "--evaluations", len(XS), **settings), cwd=folder
    )
    assert (job.returncode, job.stderr) == (0, "")
    return folder / "whole"


def list_losses(trial: optuna.trial.FrozenTrial) -> list[float]:
    return list(trial.intermediate_values.values())


def start_until_losses(
    mpi: Mpi, ranks: int, command: list[object], folder: Path, epochs: int, *xs: float
) -> Victim:
    """Start a run, and wait until each individual of `xs` has at least `epochs` losses.

    If no individual is given, wait until any evaluation has at least `epochs` losses.
    """
    victim = Victim(mpi, ranks, command, folder, folder / "log")
    run_dir = folder / str(command[command.index("--run-dir") + 1])
    victim.wait_for("done  island")
    while True:
        known = {
            t.params.get("x"): t
            for t in load_trials(run_dir)
            if len(t.intermediate_values) >= epochs
        }
        if known and all(x in known for x in xs):
            return victim
        assert victim.job.poll() is None, victim.log.read_text()
        victim.sleep(0.05)


def stop_run(victim: Victim, number: int = signal.SIGUSR1) -> None:
    stopped_at = time.monotonic()
    victim.job.send_signal(number)
    assert victim.wait(30) == (75, "")
    assert time.monotonic() - stopped_at < scale(10)


def assert_same_weights(run_dir: Path, expected_dir: Path) -> None:
    weights, expected = (
        read_weights(folder / "best.safetensors") for folder in (run_dir, expected_dir)
    )
    assert weights is not None
    assert expected is not None
    assert weights.params == expected.params
    assert all(weights.state[name].equal(tensor) for name, tensor in expected.state.items())


def test_evaluations_stopped_twice_have_the_same_losses(
    mpi: Mpi, folder: Path, whole: Path
) -> None:
    """Three workers of two ranks are stopped during their first evaluations.

    After a resume, they are stopped again.
    """
    enqueue(folder, *XS)
    expected = {trial.params["x"]: trial for trial in load_trials(whole)}
    settings = {"saves": ",".join(WAYS), "epochs": EPOCHS, "best": BEST, "folder": folder}
    options = ["--evaluations", len(XS), "--resume", "--ranks-per-worker", 2]
    stop_run(
        start_until_losses(
            mpi,
            6,
            make_saving_arguments("cut", *options, seconds=0.3, **settings),
            folder,
            3,
            *XS[:3],
        ),
        signal.SIGTERM,
    )
    states = folder / "cut" / "checkpoints"
    assert sorted(path.name for path in states.iterdir()) == [
        f"{number}.safetensors" for number in range(3)
    ]
    stop_run(
        start_until_losses(
            mpi, 6, make_saving_arguments("cut", *options, seconds=0.1, **settings), folder, 3, *XS
        )
    )
    assert {path.name for path in states.iterdir()} >= {"3.safetensors", "4.safetensors"}
    job = mpi.run(2, *make_saving_arguments("cut", *options, seconds=0, **settings), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(folder / "cut")
    resumed = [trial for trial in trials if "retry_of" in trial.user_attrs]
    assert {trial.params["x"] for trial in resumed} == set(XS)
    trained = read_epochs(folder)
    for trial in resumed:
        # The stop may come while a checkpoint is gathered. On a busy machine, not every checkpoint
        # is copied: copies take 1% of the time.
        began, interrupted = (
            trial.user_attrs["resumed_from_step"],
            trials[trial.user_attrs["retry_of"]],
        )
        assert (
            1
            <= began
            == interrupted.user_attrs["checkpoint_step"]
            <= len(interrupted.intermediate_values)
        )
        x = trial.params["x"]
        epochs = [epoch for trained_x, epoch in trained if trained_x == x]
        if "retry_of" not in interrupted.user_attrs:
            assert all(epochs.count(epoch) == 1 for epoch in range(1, began + 1)), (
                "epochs before the checkpoint are not repeated"
            )
        if trial.state.name == "COMPLETE":
            assert list_losses(trial) == list_losses(expected[x])
            assert epochs[-(EPOCHS - began) :] == [*range(began + 1, EPOCHS + 1)]
            first = next(candidate for candidate in trials if candidate.params["x"] == x)
            assert (
                trial.user_attrs["seconds"]
                > (0.3 if x in XS[:3] else 0.1) * first.user_attrs["checkpoint_step"]
            )
    assert len(find_complete_losses(trials)) == len(XS)
    assert not states.exists()
    assert_same_weights(folder / "cut", whole)


def test_killed_evaluation_repeats_at_most_one_interval(
    mpi: Mpi, folder: Path, whole: Path
) -> None:
    """All processes are killed twice. Between the kills, the evaluation trains for some epochs."""
    best = min(find_complete_losses(load_trials(whole)).items(), key=lambda item: item[1])[0]
    expected = load_trials(whole)[best]
    enqueue(folder, expected.params["x"])
    options = ["--evaluations", 1, "--checkpoint-every", "1s", "--resume"]
    cut = make_saving_arguments(
        "cut", *options, folder=folder, seconds=0.15, epochs=EPOCHS, best=BEST
    )
    shown = 0
    for _ in range(2):
        victim = start_until_losses(mpi, 2, cut, folder, shown + 9)
        victim.kill("all", random.Random(0))
        victim.wait(30)
        shown = max(len(trial.intermediate_values) for trial in load_trials(folder / "cut"))
    job = mpi.run(2, *cut, cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    *_, trial = load_trials(folder / "cut")
    assert list_losses(trial) == list_losses(expected)
    epochs = [epoch for _, epoch in read_epochs(folder)]
    repeated = len(epochs) - EPOCHS
    assert 0 <= repeated <= 2 * 9, f"{epochs}: a second has at most 7 epochs"
    assert epochs.count(1) == 1
    assert_same_weights(folder / "cut", whole)


def test_trainer_killed_at_write_fails_one_evaluation(mpi: Mpi, folder: Path) -> None:
    enqueue(folder, 0.05, 0.15)
    options = ["--evaluations", 2, "--checkpoint-every", "1s"]
    victim = start_until_losses(
        mpi,
        2,
        make_saving_arguments("run", *options, saves="killed,state", seconds=0.4),
        folder,
        1,
        0.15,
    )
    failed, _ = load_trials(folder / "run")
    assert failed.state.name == "FAIL"
    assert failed.user_attrs["failure"].startswith("rank 0: the trainer was ended by SIGKILL")
    assert 3 <= len(failed.intermediate_values) < 6
    assert list((folder / "run" / "checkpoints").glob("*0.safetensors")) == [], (
        "neither a checkpoint nor a draft is left"
    )
    assert victim.wait(60) == (0, "")
    assert len(find_complete_losses(load_trials(folder / "run"))) == 1
    assert not (folder / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("replicate", "shard", 3), ("shard", "pipeline", 2), ("pipeline", "replicate", 1)],
)
def test_parallel_network_resumes_with_other_strategy(
    mpi: Mpi, tmp_path: Path, before: str, after: str, ranks: int
) -> None:
    """Batch normalisation uses the same batches with each strategy; see `tests.support.sharing`.

    The second evaluation of a run trains the same network without an interruption, for comparison.
    """
    options = ["--evaluations", 2, "--ranks-per-worker"]
    stop_run(
        start_until_losses(
            mpi,
            2,
            make_sharing_arguments(before, *options, 2, epochs=4, slope=0, waits_after=2),
            tmp_path,
            2,
        )
    )
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    job = mpi.run(
        2,
        *make_sharing_arguments(before, *options, 2, "--resume", epochs=4, slope=0, waits_after=0),
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, resumed, whole = load_trials(tmp_path / "run")
    assert interrupted.user_attrs["failure"] == "interrupted"
    assert "resumed_from_step" not in whole.user_attrs
    assert list_losses(resumed) == list_losses(whole), "losses are equal to the last digit"
    shutil.rmtree(tmp_path / "run")
    shutil.move(tmp_path / "again", tmp_path / "run")
    settings = {
        "epochs": 4,
        "slope": 0,
        "waits_after": 0,
        "accumulate" if after == "pipeline" else "microbatches": 1,
    }
    command = make_sharing_arguments(
        after, "--evaluations", 1, *options[2:], ranks, "--resume", **settings
    )
    job = mpi.run(ranks, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    _, trial = load_trials(tmp_path / "run")
    assert trial.user_attrs["resumed_from_step"] >= 1
    assert list_losses(trial) == pytest.approx(list_losses(whole), rel=1e-4)


def test_fit_called_twice_resumes_first_training(mpi: Mpi, tmp_path: Path) -> None:
    """The second evaluation trains the same networks without an interruption.

    Both must have the same losses.
    """
    (tmp_path / "start.json").write_text('[{"lr": 0.01, "copy": 1}, {"lr": 0.01, "copy": 2}]')
    command: list[object] = [
        PROGRAM,
        SEARCHES / "folds.py",
        "--run-dir",
        "run",
        "--islands",
        1,
        "--evaluations",
        2,
    ]
    command += ["--enqueue", "start.json"]
    stop_run(start_until_losses(mpi, 2, [*command, "--set", "waits_after=5"], tmp_path, 5))
    job = mpi.run(2, *command, "--resume", "--set", "waits_after=0", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, whole, trial = load_trials(tmp_path / "run")
    assert trial.params == interrupted.params
    assert whole.params == {"lr": 0.01, "copy": 2}
    assert len(whole.intermediate_values) == 6
    assert 1 <= trial.user_attrs["resumed_from_step"] <= 3, "the second training restarts"
    assert list_losses(trial) == list_losses(whole)


def test_invalid_checkpoints_warn_and_restart_evaluations(
    mpi: Mpi, folder: Path, whole: Path
) -> None:
    xs = XS[:3]
    enqueue(folder, *xs)
    options, settings = ["--evaluations", len(xs), "--resume"], {"epochs": EPOCHS, "best": BEST}
    stop_run(
        start_until_losses(
            mpi,
            3,
            make_saving_arguments(
                "cut", *options, "--ranks-per-worker", 1, seconds=0.3, **settings
            ),
            folder,
            2,
            *xs,
        )
    )
    shutil.copytree(folder / "cut", folder / "copy")
    states = folder / "cut" / "checkpoints"
    cut, changed, of_others = (states / f"{number}.safetensors" for number in range(3))
    cut.write_bytes(cut.read_bytes()[:-7])
    content = bytearray(changed.read_bytes())
    content[-20] ^= 1
    changed.write_bytes(content)
    text = of_others.read_bytes()
    of_others.write_bytes(
        text.replace(b'"x": 0.25', b'"x": 0.26').replace(b'\\"x\\": 0.25', b'\\"x\\": 0.26')
    )
    fresh = make_saving_arguments("fresh", *options[:2], width=6, seconds=0, **settings)
    assert mpi.run(2, *fresh, cwd=folder).returncode == 0
    reasons = [
        "cannot be read: it is incomplete",
        *["cannot be read: its checksum does not match"] * 2,
    ]
    for width, expected, messages in (
        (5, whole, reasons),
        (6, folder / "fresh", [r"saving.py:\d+: "] * 3),
    ):
        job = mpi.run(
            2,
            *make_saving_arguments("cut", *options, width=width, seconds=0, **settings),
            cwd=folder,
        )
        assert job.returncode == 0, job.stderr
        trials = load_trials(folder / "cut")[3:]
        # Two workers of one rank print them, in any order.
        warnings = sorted(job.stderr.splitlines())
        assert len(warnings) == len(trials) == 3
        for trial, warning in zip(trials, warnings, strict=True):
            repeats = trial.user_attrs["retry_of"]
            prefix = (
                f"warning: trial {trial.number} restarts, since it cannot resume from its "
                "checkpoint: "
            )
            assert re.match(f"{prefix}.*{messages[repeats]}", warning), warning
            assert list_losses(trial) == list_losses(load_trials(expected)[repeats])
            assert "resumed_from_step" not in trial.user_attrs
        assert not states.exists()
        shutil.rmtree(folder / "cut")
        if width == 5:
            shutil.move(folder / "copy", folder / "cut")


def test_invalid_save_checkpoint_fails_with_its_line(mpi: Mpi, folder: Path) -> None:
    ways = {
        "object": (
            r"TypeError: a saved state .*, got the Adam itself: save its state_dict\(\) at "
            r"\['all'\]\[1\]"
        ),
        "function of an object": (
            r"TypeError: .* got the Linear itself: save its state_dict\(\) at \['network'\]"
        ),
        "failing function": r"rank 1, saving.py:\d+: ValueError: injected: gathering",
        "one function": (
            r"not all ranks saved a function, .*: rank 0 did not at saving.py:\d+, rank 1 did at .*"
        ),
        "late": r"RuntimeError: worker.checkpoint must be read before the first loss",
        "none": "",
    }
    enqueue(folder, *((number + 0.5) / 10 for number in range(len(ways))))
    job = mpi.run(
        2,
        *make_saving_arguments("run", "--evaluations", len(ways), saves=",".join(ways), seconds=0),
        cwd=folder,
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(folder / "run")
    for trial, (way, reason) in zip(trials, ways.items(), strict=True):
        if reason:
            assert trial.state == optuna.trial.TrialState.FAIL, way
            assert re.search(reason, trial.user_attrs["failure"]), trial.user_attrs["failure"]
    assert len(find_complete_losses(trials)) == 1
    assert not (folder / "run" / "checkpoints").exists()


def test_checkpoint_every_off_saves_nothing(mpi: Mpi, folder: Path) -> None:
    options = ["--evaluations", 1, "--checkpoint-every", "off"]
    stop_run(
        start_until_losses(
            mpi,
            2,
            make_saving_arguments("run", *options, saves="function", epochs=EPOCHS, seconds=0.3),
            folder,
            2,
        )
    )
    assert not (folder / "run" / "checkpoints").exists()
    interrupted, waiting = load_trials(folder / "run")
    assert "checkpoint_step" not in interrupted.user_attrs
    assert waiting.state.name == "WAITING"


def test_confirmation_resumes_and_stray_files_are_removed(mpi: Mpi, folder: Path) -> None:
    options = ["--evaluations", 1, "--confirm-seeds", 1]
    command = make_saving_arguments("run", *options, seconds=0.6)
    victim = Victim(mpi, 2, command, folder, folder / "log")
    victim.wait_for("confirming the best")
    while len(load_trials(folder / "run", "run-confirm")[0].intermediate_values) < 2:
        victim.sleep(0.05)
    stop_run(victim)
    run = RunReader(folder / "run")
    evaluations = [*run.read_evaluations(), *run.read_confirmations(all_plans=True)]
    busy = compute_busy_fraction(evaluations, workers=1, since=0.0)
    assert busy is not None
    assert busy < 1, "there is time between the search and the interrupted confirmation"
    assert run.run_dir.read_summary()["worker_busy_fraction"] == busy
    states = folder / "run" / "checkpoints"
    assert [path.name for path in states.iterdir()] == ["confirm-0.safetensors"]
    shutil.copy(states / "confirm-0.safetensors", states / "3.safetensors")
    shutil.copy(states / "confirm-0.safetensors", states / ".0.safetensors")
    job = mpi.run(2, *command, "--resume", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    interrupted, trial = load_trials(folder / "run", "run-confirm")
    assert 1 <= trial.user_attrs["resumed_from_step"] <= len(interrupted.intermediate_values)
    assert len(trial.intermediate_values) == 6
    assert not states.exists()
