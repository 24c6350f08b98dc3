"""Run the examples in README.md and docs/ as they are written."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from hpo.store.weights import read_weights
from tests.support.chaos import Victim
from tests.support.docs import blocks, commands_with, example
from tests.support.launch import HPO, PROGRAM, ROOT, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

if TYPE_CHECKING:
    from torch import Tensor


def loss_of_best(program: Path, run_dir: Path) -> tuple[float, dict[str, Tensor]]:
    """Load weights of a run into a plain network. Return its validation loss and the weights."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch.nn.functional import cross_entropy

    with safe_open(run_dir / "best.safetensors", "pt") as file:
        params: dict[str, Any] = json.loads(file.metadata()["params"])
    module, weights = runpy.run_path(str(program)), load_file(run_dir / "best.safetensors")
    network = module["build_model"](params).eval()
    network.load_state_dict(weights)
    inputs, labels = module["prepare"](*([module["Settings"]()] if "Settings" in module else []))
    with torch.no_grad():
        return float(cross_entropy(network(inputs[1400:]), labels[1400:])), weights


def test_readme_search_file_runs_as_written(mpi: Mpi, tmp_path: Path) -> None:
    (code,) = blocks("README.md", "python")
    (directive,) = blocks("docs/training/own-model.md", "{literalinclude} ../../README.md")
    start, end = re.findall(r"-(?:after|before): \"(.*)\"", directive)
    listing = (ROOT / "README.md").read_text("utf-8").partition(start)[2].partition(end)[0]
    assert listing.strip() == code.strip()
    (tmp_path / "my_search.py").write_text(code, "utf-8")
    command = [
        PROGRAM,
        "my_search.py",
        "--set",
        "epochs=3",
        "--islands",
        1,
        "--evaluations",
        3,
        "--run-dir",
        "run",
    ]
    job = mpi.run(2, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    losses = find_complete_losses(load_trials(tmp_path / "run")).values()
    assert len(losses) == 3
    assert min(losses) < 2.2, "it learns: chance is 2.3"


def test_the_worked_example_runs_as_written(mpi: Mpi, tmp_path: Path) -> None:
    import torch
    from torchvision.models import resnet18

    (tmp_path / "my_images.py").write_text(
        example("docs/training/own-model.md", "my_images.py"), "utf-8"
    )
    make_images(tmp_path / "images")
    torch.save(resnet18().state_dict(), tmp_path / "resnet18.pth")
    settings = ["weights=resnet18.pth", "epochs=1", "batch_size=4", "loaders=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    command = [
        PROGRAM,
        "my_images.py",
        *options,
        "--islands",
        1,
        "--evaluations",
        1,
        "--run-dir",
        "run",
    ]
    job = mpi.run(2, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 1


def test_text_transformer_is_trained_alike_in_three_ways(mpi: Mpi, tmp_path: Path) -> None:
    program = ROOT / "search_spaces" / "text_transformer.py"
    params = {
        "depth": 2,
        "width": 64,
        "heads": 2,
        "dropout": 0.1,
        "lr": 0.01,
        "warmup": 0.1,
        "weight_decay": 0.01,
    }
    (tmp_path / "start.json").write_text(json.dumps([params]), "utf-8")
    sizes = ["context=16", "epochs=2", "train_samples=210", "validation_samples=101"]
    losses: list[float] = []
    for ways in (["replicate"], ["shard"], ["pipeline", "microbatches=3"]):
        options = [
            word
            for option in [f"parallel={ways[0]}", *ways[1:], *sizes]
            for word in ("--set", option)
        ]
        command = [PROGRAM, program, "--enqueue", "start.json", "--evaluations", 1, *options]
        job = mpi.run(2, *command, "--run-dir", ways[0], cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, "")
        losses += find_complete_losses(load_trials(tmp_path / ways[0])).values()
        weights = read_weights(tmp_path / ways[0] / "best.safetensors")
        assert weights is not None
        module = runpy.run_path(str(program))
        network = module["build_network"](params, module["prepare"](module["Settings"](context=16)))
        network.load_state_dict(weights.state)
    assert len(losses) == 3
    assert losses[0] < 4.0, "it learns: chance is 4.6"
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.parametrize("page", ["fsdp", "pipeline"])
def test_the_weights_of_a_network_in_parts_are_whole(mpi: Mpi, tmp_path: Path, page: str) -> None:
    name = {"fsdp": "my_sharded.py", "pipeline": "my_pipeline.py"}[page]
    program = tmp_path / name
    program.write_text(example(f"docs/training/{page}.md", name), "utf-8")
    job = mpi.run(2, PROGRAM, name, "--evaluations", 1, "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    (loss,) = find_complete_losses(load_trials(tmp_path / "run")).values()
    assert loss_of_best(program, tmp_path / "run")[0] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(("name", "size"), [("my_trainer.py", 2), ("my_fabric.py", 3)])
def test_what_lightning_trains_is_searched_as_written(
    mpi: Mpi, tmp_path: Path, name: str, size: int
) -> None:
    (tmp_path / name).write_text(example("docs/training/frameworks.md", name), "utf-8")
    options = ["--evaluations", 2, "--islands", 1, "--ranks-per-worker", size, "--run-dir", "run"]
    job = mpi.run(size, PROGRAM, name, *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [len(trial.intermediate_values) for trial in trials] == [3, 3]
    best = min(trials, key=lambda trial: trial.values)
    assert best.values[0] < 2.2, "it learns: chance is 2.3"
    width, weights = best.params["width"], read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    shapes = {
        name.removeprefix("net."): list(tensor.shape) for name, tensor in weights.state.items()
    }
    assert shapes == {
        "0.weight": [width, 64],
        "0.bias": [width],
        "2.weight": [10, width],
        "2.bias": [10],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "run"], (
        "no checkpoints, no logs"
    )


def test_script_for_torchrun_is_searched_as_written(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example("docs/training/scripts.md", "train.py"), "utf-8")
    hpo = HPO
    commands = commands_with("docs/training/scripts.md", "mpirun")
    (_, checking, whole, launched, resuming) = commands
    job = mpi.run(int(whole[2]), *hpo, *whole[4:], cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert len(find_complete_losses(load_trials(tmp_path / "runs" / "script"))) == 16
    job = mpi.run(int(checking[2]), *hpo, *checking[4:], cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    (of_readme,) = commands_with("README.md", "mpirun -n 8 hpo search --space")
    first_options = ["--evaluations", 4, "--run-dir", "readme"]
    job = mpi.run(4, *hpo, "search", *first_options, *of_readme[5:], cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    options = ["--evaluations", 2, "--run-dir", "launched"]
    job = mpi.run(2, *hpo, "search", *options, *launched[5:], cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "torchrun --nproc_per_node=2 is left out" in job.stdout
    (_, saving, search) = blocks("docs/training/scripts.md", "python")
    (tmp_path / "my_search.py").write_text(search, "utf-8")
    options = ["--set", "epochs=1", "--evaluations", 2, "--run-dir", "file"]
    job = mpi.run(2, *hpo, "search", "my_search.py", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert all(len(trial.intermediate_values) == 1 for trial in load_trials(tmp_path / "file"))
    script = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(script[: script.index("for epoch in")] + saving)
    options = [
        "--space",
        "lr=Float(1e-3, 1e-1, log=True)",
        "--pruner",
        "asha",
        "--run-dir",
        "saving",
    ]
    job = mpi.run(
        2,
        *hpo,
        "search",
        *options,
        "--evaluations",
        9,
        "--",
        "train.py",
        "--epochs",
        9,
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (0, "")
    continued = [
        trial
        for trial in load_trials(tmp_path / "saving")
        if trial.user_attrs.get("resumed_from_step")
    ]
    assert any(
        len(trial.intermediate_values) > trial.user_attrs["resumed_from_step"]
        for trial in continued
    )
    (tmp_path / "train.py").write_text("import sys\nprint(f'val_loss=1 {sys.argv[1:]}')\n")
    job = mpi.run(
        2, *hpo, "search", "--evaluations", 2, "--run-dir", "last", *resuming[5:], cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (0, "")


def test_interrupted_training_resumes_and_keeps_best_weights(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network overfits early, since it takes large steps on half of the samples each."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "my_long_search.py"
    program.write_text(example("docs/training/checkpoints.md", program.name), "utf-8")
    Path("start.json").write_text(json.dumps([{"width": 128, "dropout": 0.1, "lr": 0.1}]), "utf-8")
    options = [
        "--enqueue",
        "start.json",
        "--evaluations",
        1,
        "--set",
        "epochs=200",
        "--set",
        "batch_size=700",
    ]

    def arguments(run_dir: str) -> list[object]:
        return [PROGRAM, program.name, *options, "--run-dir", run_dir]

    assert mpi.run(2, *arguments("whole"), cwd=tmp_path).returncode == 0
    losses = reported("whole", 0)
    best = losses.index(min(losses))
    assert best < 150, "after it there is time to stop"

    victim = Victim(mpi, 2, arguments("cut"), tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while len(reported("cut", 0)) < best + 2:
        victim.sleep(0.05)
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait() == (75, "")
    assert not Path("cut", "best.safetensors").exists()
    assert len(reported("cut", 0)) < 200
    assert mpi.run(2, *arguments("cut"), "--resume", cwd=tmp_path).returncode == 0
    assert reported("cut", 1) == losses
    (loss, weights), (_, expected) = (
        loss_of_best(program, Path(run_dir)) for run_dir in ("cut", "whole")
    )
    assert loss == pytest.approx(min(losses), rel=1e-4)
    assert all(weights[name].equal(expected[name]) for name in expected)
    loading = blocks("docs/training/checkpoints.md", "python")[1]
    assert '"runs/long/best.safetensors"' in loading
    command = [sys.executable, "-c", loading.replace("runs/long", "whole")]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=scale(60)
    ).stdout
    assert printed.startswith("0 {'width': 128, ")


def reported(run_dir: str, trial: int) -> list[float]:
    """Return the losses that a trial has reported so far; none if it does not exist."""
    trials = load_trials(Path(run_dir))
    return list(trials[trial].intermediate_values.values()) if trial < len(trials) else []


def make_images(folder: Path) -> None:
    """Write dark and light images: 5 of each for training, and 3 of each for validation.

    Neither 2 nor 3 ranks can divide 5 images equally.
    """
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 3)):
        for name, least in (("dark", 0), ("light", 100)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(least, least + 156, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


@pytest.mark.parametrize(
    "script", blocks("docs/operation/clusters.md", "bash") + blocks("docs/tutorial.md", "bash")
)
def test_scripts_are_bash(script: str) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=scale(10)
    )
    assert (checked.returncode, checked.stderr) == (0, "")


# Messages of torch that failures contain.
TORCH = ("CUDA out of memory", "DataLoader worker (pid(s) ...) exited unexpectedly")


def string_pieces() -> set[str]:
    """Return all strings and constant parts of strings in the package, among them its messages."""
    pieces = set()
    for path in (ROOT / "hpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.add(node.value)
    return pieces


def test_troubleshooting_lists_messages_of_the_code() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs/operation/troubleshooting.md").read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    pieces = sorted(
        {piece.strip() for piece in string_pieces() if len(piece.strip()) > 6},
        key=len,
        reverse=True,
    )
    for message in messages:
        rest = message
        for part in filter(None, map(str.strip, message.split("..."))):
            if any(part in piece for piece in pieces):
                rest = rest.replace(part, "")
        for piece in pieces:
            rest = rest.replace(piece, "")
        left = re.findall(r"[a-z]{3,}", rest)
        assert message in TORCH or len(left) < 3, f"not in the code: {message!r}, {left}"


def documented_commands(page: Path) -> list[list[str]]:
    """Return the arguments of each command of this project in the code blocks of a page."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    found = []
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = line in ("```bash", "```console", "```text", "```")
            continue
        match = re.search(r"(?:^|[ /])(?:hpo|run_islands\.py)( .*)", line)
        is_command = (line.startswith("    ") or is_code) and "[OPTIONS]" not in line
        if (
            is_command
            and match
            and re.match(r"\s*(\$ )?(hpo|mpirun|srun|python|run_islands)\b", line)
        ):
            name = "search" if "run_islands.py" in line else ""
            found.append(shlex.split(f"{name} {match[1]}", comments=True))
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_have_known_options(page: Path) -> None:
    from typer.main import get_command

    from hpo.cli.commands import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, *arguments in documented_commands(page):
        if name == "--version":
            continue
        command = commands[name]
        own = arguments[: arguments.index("--")] if "--" in arguments else arguments
        # Raises NoSuchOption, or BadOptionUsage if a value is missing.
        context = command.context_class(command, info_name=name, **command.context_settings)
        command.make_parser(context).parse_args(own)
