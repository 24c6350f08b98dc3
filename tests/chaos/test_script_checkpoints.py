"""Test `hpo.save_checkpoint`, `hpo.checkpoint` and `hpo.offer_weights` in scripts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpo.evaluation.draft_store import DraftStore
from hpo.store.checkpoints import read_checkpoint_info
from hpo.store.weights import read_weights
from tests.support.chaos import Victim, kill_at_end
from tests.support.checkpoints import read_checkpoint_weights
from tests.support.launch import HPO, ROOT, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

SAVING = ROOT / "tests" / "scripts" / "saving.py"
SEARCH = [*HPO, "search", "--run-dir", "run", "--space", "x=Float(0.0, 0.9)"]


def list_losses(trial: Any) -> list[float]:
    return [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]


def assert_losses_are_as_if_undisturbed(trials: list[Any]) -> None:
    for trial in trials:
        losses = list_losses(trial)
        expected = [trial.params["x"] + abs(epoch - 2) for epoch in range(1, len(losses) + 1)]
        assert losses == pytest.approx(expected), trial.number


def wait_for_losses(run_dir: Path, number: int, evaluations: int = 1) -> None:
    """Wait until as many evaluations of the run have reported `number` losses each."""
    end = time.monotonic() + scale(60)
    while True:
        assert time.monotonic() < end
        with suppress(OSError, KeyError, ValueError):  # The study may not exist yet.
            if (
                sum(len(trial.intermediate_values) >= number for trial in load_trials(run_dir))
                >= evaluations
            ):
                return
        time.sleep(0.1)


@pytest.mark.parametrize("way", ["call", "sharded"])
def test_paused_script_resumes_from_its_checkpoint(mpi: Mpi, tmp_path: Path, way: str) -> None:
    # Each individual is worse than the previous, so that the first paused ones are promoted later.
    given = [{"x": number / 20} for number in range(12)]
    (tmp_path / "given.json").write_text(json.dumps(given))
    options = ["--pruner", "asha", "--enqueue", "given.json", "--evaluations", len(given)]
    job = mpi.run(4, *SEARCH, *options, "--", SAVING, "--way", way, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert_losses_are_as_if_undisturbed(trials)
    paused = [trial for trial in trials if "paused_after" in trial.user_attrs]
    continued = [trial for trial in trials if trial.user_attrs.get("resumed_from_step")]
    assert len(paused) >= 3
    assert any(
        len(trial.intermediate_values) > trial.user_attrs["resumed_from_step"]
        for trial in continued
    )
    assert not any(
        "paused_after" not in trial.user_attrs for trial in trials if trial.state.name == "PRUNED"
    )
    best = min(
        trials,
        key=lambda trial: trial.values[0] if trial.state.name == "COMPLETE" else float("inf"),
    )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert (weights.trial, weights.params, weights.state["progress"].tolist()) == (
        best.number,
        best.params,
        [2.0] * 4,
    )
    assert best.user_attrs["metrics"] == {"epoch": 2.0}
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("way", "signal_"),
    [("call", signal.SIGKILL), ("lines of rank 0", signal.SIGKILL), ("call", signal.SIGTERM)],
)
def test_interrupted_script_resumes_from_its_checkpoint(
    mpi: Mpi, tmp_path: Path, way: str, signal_: signal.Signals
) -> None:
    (tmp_path / "given.json").write_text('[{"x": 0.0}, {"x": 0.1}, {"x": 0.2}]')
    options = ["--enqueue", "given.json", "--resume", "--evaluations", 3]
    # With an hour, only the stop writes a checkpoint: the latest copy, which may be older on busy
    # cores, since copies take at most 1% of the time.
    every, least = ("1s", 5) if signal_ == signal.SIGKILL else ("1h", 0)
    options += ["--checkpoint-every", every]
    command = ["--loss", r"val_loss=(\S+)", "--", SAVING, "--way", way, "--epochs", 60]
    # An evaluation takes at least 20 s, more than a run that is stopped waits for.
    slow = {"SAVING_SECONDS": "0.2"}
    with kill_at_end(
        Victim(mpi, 4, [*SEARCH, *options, *command], tmp_path, tmp_path / "log", slow)
    ) as victim:
        wait_for_losses(tmp_path / "run", 10, evaluations=2)
        victim.job.send_signal(signal_)
        victim.wait(30)
    job = mpi.run(2, *SEARCH, *options, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert_losses_are_as_if_undisturbed(trials)
    assert len(find_complete_losses(trials)) == 3
    continued = [trial for trial in trials if "resumed_from_step" in trial.user_attrs]
    assert len(continued) == 2
    assert min(trial.user_attrs["resumed_from_step"] for trial in continued) > least
    assert all(len(trial.intermediate_values) == 60 for trial in continued)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["progress"].tolist() == [2.0] * 4
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_checkpoints_on_rank_without_losses_warn(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--pruner", "asha", "--evaluations", 4, "--loss", r"val_loss=(\S+)"]
    job = mpi.run(4, *SEARCH, *options, "--", SAVING, "--way", "lines of rank 1", cwd=tmp_path)
    assert job.returncode == 0
    assert re.fullmatch(
        r"warning: trial \d: rank 0 saves checkpoints, and reports no losses: .*\n", job.stderr
    )
    assert "PRUNED" in [trial.state.name for trial in load_trials(tmp_path / "run")]
    assert_losses_are_as_if_undisturbed(load_trials(tmp_path / "run"))


def test_script_that_cannot_resume_restarts(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nimport time\nimport hpo\n\n"
        "if hpo.checkpoint is not None:\n    raise ValueError('injected: it does not fit')\n"
        "for epoch in range(3):\n"
        "    hpo.save_checkpoint({'epoch': epoch})\n"
        "    hpo.report(3.0 - epoch)\n"
        "    while epoch == 1 and not os.path.exists('go'):\n"
        "        time.sleep(0.1)\n"
    )
    options = ["--resume", "--evaluations", 1, "--", "train.py"]
    with kill_at_end(Victim(mpi, 1, [*SEARCH, *options], tmp_path, tmp_path / "log")) as victim:
        wait_for_losses(tmp_path / "run", 2)
        victim.job.send_signal(signal.SIGTERM)
        victim.wait(30)
    assert (tmp_path / "run" / "checkpoints" / "0.safetensors").exists()
    (tmp_path / "go").touch()
    job = mpi.run(1, *SEARCH, *options, cwd=tmp_path)
    assert job.returncode == 0
    assert (
        "warning: trial 1 restarts, since it cannot resume from its checkpoint: rank 0, "
        "train.py:6: " in job.stderr
    )
    trials = load_trials(tmp_path / "run")
    assert list_losses(trials[1]) == [3.0, 2.0, 1.0]
    assert "resumed_from_step" not in trials[1].user_attrs


RARE_CHECKPOINTS = """
import sys
import time
from pathlib import Path

checkpoint = Path(sys.argv[1], "last.txt")
first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
for epoch in range(first, 10):
    print(f"epoch {epoch}\\nloss {10 - epoch}", flush=True)
    if epoch % 4 == 0:
        checkpoint.write_text(str(epoch))
    while str(epoch) == Path("last_epoch.txt").read_text():
        time.sleep(0.1)
"""


def make_resuming_command(folder: Path, script: str) -> list[object]:
    """Write a script that resumes from its own files, and return the command of its search."""
    (folder / "train.py").write_text(script)
    options = ["--evaluations", 1, "--loss", r"loss (\d+)", "--step", r"epoch (\d+)", "--resume"]
    options += ["--resume-args", "{checkpoint}", "--resume-file", "last.txt"]
    return [*SEARCH, *options, "--", "train.py", "{folder}"]


def kill_in_epoch(
    mpi: Mpi, folder: Path, command: list[object], epoch: int, losses: int, checkpoint: int
) -> None:
    """Kill a search in this epoch, when its last trial has as many losses, and its checkpoint."""
    trials = len(load_trials(folder / "run")) if (folder / "run").exists() else 0
    (folder / "last_epoch.txt").write_text(str(epoch))
    with kill_at_end(Victim(mpi, 1, command, folder, folder / "log")) as victim:
        wait_for_losses(folder / "run", losses, evaluations=trials + 1)
        while (folder / "run" / "trials" / "0" / "last.txt").read_text() != str(checkpoint):
            time.sleep(0.02)  # The test has a time limit.
        victim.job.send_signal(signal.SIGKILL)
        victim.wait(20)
    (folder / "last_epoch.txt").write_text("none")


def test_epochs_after_the_last_checkpoint_count_once(mpi: Mpi, tmp_path: Path) -> None:
    command = make_resuming_command(tmp_path, RARE_CHECKPOINTS)
    # The loss of an epoch is known when the next begins. The second stop is in a repeated epoch.
    kill_in_epoch(mpi, tmp_path, command, 7, losses=6, checkpoint=4)
    kill_in_epoch(mpi, tmp_path, command, 6, losses=6, checkpoint=4)
    job = mpi.run(1, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert list_losses(trials[2]) == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert [trial.user_attrs.get("resumed_from_step") for trial in trials] == [None, 6, 6]


def test_step_of_a_lost_loss_stays_empty(mpi: Mpi, tmp_path: Path) -> None:
    command = make_resuming_command(tmp_path, RARE_CHECKPOINTS)
    # It is killed after the checkpoint of epoch 8, whose loss would be known in epoch 9.
    kill_in_epoch(mpi, tmp_path, command, 8, losses=7, checkpoint=8)
    job = mpi.run(1, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    expected = {epoch: 10 - epoch for epoch in range(1, 10) if epoch != 8}
    assert load_trials(tmp_path / "run")[1].intermediate_values == expected


def test_script_that_counts_epochs_anew_after_a_resume_warns(mpi: Mpi, tmp_path: Path) -> None:
    anew = RARE_CHECKPOINTS.replace('print(f"epoch {epoch}', 'print(f"epoch {epoch - first}')
    command = make_resuming_command(tmp_path, anew)
    kill_in_epoch(mpi, tmp_path, command, 9, losses=8, checkpoint=8)
    job = mpi.run(1, *command, cwd=tmp_path)
    assert "--step must find a number that continues after a resume" in job.stderr
    assert list_losses(load_trials(tmp_path / "run")[1]) == [9, 8, 7, 6, 5, 4, 3, 2]


def test_script_functions_in_objective_use_its_worker(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_search.py").write_text(
        "import torch\nimport hpo\nfrom hpo import Float, SearchSpace\n\nspace = "
        "SearchSpace(x=Float(0.0, 0.9))\n\n\ndef objective(params, worker):\n    assert "
        "(hpo.trial, hpo.folder, hpo.checkpoint) == (worker.trial, worker.folder, None)\n    for "
        "epoch in range(3):\n        hpo.save_checkpoint({'epoch': epoch})\n        "
        "hpo.offer_weights({'x': torch.tensor(params['x'])})\n        hpo.report(params['x'] + "
        "epoch, epoch=epoch)\n"
    )
    search = [*HPO, "search", "my_search.py", "--run-dir", "run"]
    job = mpi.run(2, *search, "--evaluations", 3, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    for trial in load_trials(tmp_path / "run"):
        assert list_losses(trial) == pytest.approx(
            [trial.params["x"] + epoch for epoch in range(3)]
        )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["x"].item() == pytest.approx(weights.params["x"])


def test_script_functions_outside_search_do_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, hpo\n"
        "hpo.save_checkpoint(object())\nhpo.offer_weights(None)\nhpo.report('no number')\n"
        "print(hpo.checkpoint, hpo.trial, hpo.folder, 'torch' in sys.modules)\n"
    )
    job = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=scale(60),
    )
    assert (job.stdout, job.stderr) == ("None None None False\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            "save_checkpoint({'model': torch.nn.Linear(1, 1)})",
            "a saved state must be .* at ['model']",
        ),
        (
            "offer_weights(torch.nn.Linear(1, 1))",
            "offered weights must be a state_dict(), got a network: offer .*",
        ),
        ("report('0.3')", "hpo.report: loss must be a number, got '0.3'"),
    ],
)
def test_script_function_with_wrong_value_fails(
    mpi: Mpi, tmp_path: Path, call: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(f"import torch, hpo\n\nhpo.{call}\nhpo.report(1.0)\n")
    job = mpi.run(1, *SEARCH, "--evaluations", 1, "--", "train.py", cwd=tmp_path)
    assert job.returncode == 3
    expected = f"rank 0, train.py:3: TypeError: {re.escape(reason).replace(re.escape('.*'), '.*')}"
    assert re.fullmatch(expected, load_trials(tmp_path / "run")[0].user_attrs["failure"])


def test_check_resumes_script_from_its_checkpoint(mpi: Mpi, tmp_path: Path) -> None:
    check = [*HPO, "check", "--", SAVING, "--x", 0.5]
    job = mpi.run(2, *check, cwd=tmp_path)
    assert job.returncode == 0, job.stdout
    assert "ok     After a resume from the first checkpoint, the losses are the same" in job.stdout


def test_drafts_belong_to_next_printed_loss(mpi: Mpi, tmp_path: Path) -> None:
    """The script prints losses faster than the supervisor reads them.

    Checkpoints must still belong to the right losses.
    """
    (tmp_path / "train.py").write_text(
        "import sys, time, torch, hpo\n\n"
        "state = hpo.checkpoint\nfirst = 0 if state is None else state['epoch'] + 1\n"
        "for epoch in range(first, 30):\n"
        "    time.sleep(0.002)\n"
        "    loss = float(sys.argv[2]) + abs(epoch - 20)\n"
        "    hpo.save_checkpoint({'epoch': epoch})\n"
        "    hpo.offer_weights({'epoch': torch.tensor([epoch])})\n"
        "    print(f'epoch {epoch}', file=sys.stderr)\n"
        "    print(f'val_loss={loss}', file=sys.stderr if hpo.trial % 2 else sys.stdout)\n"
    )
    options = [
        "--ranks-per-worker",
        1,
        "--evaluations",
        6,
        "--loss",
        r"val_loss=(\S+)",
        "--pruner",
        "asha",
    ]
    job = mpi.run(2, *SEARCH, *options, "--", "train.py", "--x", "{x}", cwd=tmp_path)
    assert job.returncode == 0
    assert "warning" not in job.stderr
    trials = load_trials(tmp_path / "run")
    for trial in trials:
        losses = list_losses(trial)
        assert losses == pytest.approx(
            [trial.params["x"] + abs(epoch - 20) for epoch in range(len(losses))]
        )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["epoch"].item() == 20
    assert min(len(trial.intermediate_values) for trial in trials) < 30, (
        "some evaluations are paused"
    )
    printed = (tmp_path / "run" / "logs" / "0.txt").read_text()
    assert "hpo:" not in printed


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (
            ["hpo.save_checkpoint({})", "hpo.report(1.0)"],
            "it saves checkpoints, and never reads hpo.checkpoint: ",
        ),
        (
            ["hpo.checkpoint", "hpo.report(1.0)", "hpo.save_checkpoint({})"],
            "its last checkpoint belongs to no loss: ",
        ),
    ],
)
def test_unusable_checkpoints_warn_once(
    mpi: Mpi, tmp_path: Path, lines: list[str], warning: str
) -> None:
    (tmp_path / "train.py").write_text("import hpo\n" + "\n".join(lines))
    job = mpi.run(1, *SEARCH, "--evaluations", 2, "--", "train.py", cwd=tmp_path)
    assert job.returncode == 0
    assert job.stderr.startswith(f"warning: trial 0: {warning}")
    assert job.stderr.count("\n") == 1


def test_checkpoint_has_weights_of_its_own_lowest_loss(tmp_path: Path) -> None:
    drafts = DraftStore(tmp_path / ".0", {"x": 1.0})
    for number, content in enumerate(("a", "b")):
        save_file({"w": torch.tensor([number])}, tmp_path / f".0-weights-{content}.safetensors")
    save_file(
        {"state/0": torch.ones(3)}, tmp_path / ".0-state.safetensors", {"tree": '{"tensor": "0"}'}
    )
    first, second, state = (drafts.take_named(name) for name in ("weights-a", "weights-b", "state"))
    assert first is not None
    assert second is not None
    assert state is not None
    assert drafts.take_named("missing") is None
    drafts.keep_weights(first)
    drafts.keep_checkpoint(state, {"losses": [1.0], "metrics": {}, "seconds": 0.1})
    drafts.keep_weights(second)
    assert drafts.make_checkpoint_file(tmp_path / "0.safetensors") == 1
    assert read_checkpoint_info(tmp_path / "0.safetensors").losses == [1.0]
    assert read_checkpoint_weights(tmp_path / "0.safetensors")["w"].item() == 0
    drafts.make_weights_file(tmp_path / "best.safetensors", {})
    assert load_file(tmp_path / "best.safetensors")["w"].item() == 1
    drafts.close()
    assert {path.name for path in tmp_path.iterdir()} == {"0.safetensors", "best.safetensors"}
