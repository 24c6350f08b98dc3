"""Test the package's search spaces for larger networks: whole runs, and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import UsageError
from hpo.trainer.search_file import load_search_file
from tests.support.cifar import write_cifar10
from tests.support.launch import PROGRAM, ROOT, Mpi
from tests.support.run_output import find_complete_losses, load_trials, remove_loading_lines

RESNET = ROOT / "search_spaces" / "cifar10_resnet.py"
TRANSFORMER = ROOT / "search_spaces" / "text_transformer.py"
SMALL = {
    "depth": 2,
    "width": 64,
    "heads": 2,
    "dropout": 0.1,
    "lr": 0.01,
    "warmup": 0.1,
    "weight_decay": 0.01,
}
CALM = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "label_smoothing": 0.1,
    "augmentation": "crop-and-flip",
    "schedule": "one-cycle",
}


def run_search_space(
    mpi: Mpi, folder: Path, search: Path, params: dict[str, Any], *settings: str
) -> tuple[float, Any]:
    """Evaluate one individual on two ranks. Return its loss and the content of test.json."""
    (folder / "start.json").write_text(json.dumps([params]), "utf-8")
    options = [word for setting in settings for word in ("--set", setting)]
    command = [
        PROGRAM,
        search,
        "--enqueue",
        "start.json",
        "--evaluations",
        1,
        "--run-dir",
        "run",
        *options,
    ]
    job = mpi.run(2, *command, cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    (loss,) = find_complete_losses(load_trials(folder / "run")).values()
    return loss, json.loads((folder / "run" / "test.json").read_text("utf-8"))


def test_text_transformer_in_pipeline_stages_learns(mpi: Mpi, tmp_path: Path) -> None:
    sizes = [
        "context=32",
        "train_samples=1600",
        "validation_samples=200",
        "batch_size=32",
        "epochs=1",
    ]
    loss, test = run_search_space(
        mpi, tmp_path, TRANSFORMER, SMALL, *sizes, "parallel=pipeline", "microbatches=2"
    )
    assert 1.5 < loss < 3.5, "The loss of a random guess is 4.57."
    assert test["metrics"]["loss"] == pytest.approx(loss, rel=0.1)
    assert 0.1 < test["metrics"]["accuracy"] < 0.5
    assert [text["prompt"] for text in test["texts"]] == ["def ", "class ", "import "]
    assert all(len(text["text"]) == 64 for text in test["texts"])


def test_cifar10_resnet_trains_on_binary_files(mpi: Mpi, tmp_path: Path) -> None:
    # 10,000 of the 10,200 samples are for validation.
    write_cifar10(tmp_path / "files", batch=2040)
    sizes = ["train_samples=64", "validation_samples=40", "batch_size=16", "epochs=1"]
    loss, test = run_search_space(mpi, tmp_path, RESNET, CALM, *sizes, "data_dir=files")
    assert test["metrics"]["loss"] == pytest.approx(loss, rel=0.2), (
        "The tested weights must have this loss."
    )
    assert 0.0 <= test["metrics"]["accuracy"] <= 1.0
    assert len(test["predictions"]) > 10


PARALLEL = "parallel must be one of replicate, shard, pipeline, got ddp"
SAMPLES = "train_samples must be at most 9"


@pytest.mark.parametrize(
    ("setting", "message"), [("parallel=ddp", PARALLEL), ("train_samples=99999999", SAMPLES)]
)
def test_run_with_invalid_setting_prints_one_message(
    mpi: Mpi, tmp_path: Path, setting: str, message: str
) -> None:
    job = mpi.run(2, PROGRAM, TRANSFORMER, "--set", setting, cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.startswith("error: ")
    assert job.stderr.count("\n") == 1, "Only one rank must print it."
    assert message in job.stderr
    assert list(tmp_path.iterdir()) == [], "The run must not have started."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "settings", "message"),
    [
        (TRANSFORMER, ["microbatches=2"], "microbatches must be 1 unless parallel=pipeline, got 2"),
        (
            RESNET,
            ["dataset=imagenet"],
            "dataset must be one of cifar10, fashion-mnist, digits, got imagenet",
        ),
        (
            RESNET,
            ["precision=fp16"],
            "precision must be one of float32, bfloat16, float16, got fp16",
        ),
        (RESNET, ["batch_size=0"], "batch_size must be at least 1, got 0"),
        (
            RESNET,
            ["data_dir=nowhere"],
            "CIFAR10 (binary version) is missing and could not be downloaded",
        ),
        (
            RESNET,
            ["dataset=digits", "train_samples=99999999"],
            "train_samples must be at most 1078, ",
        ),
    ],
)
def test_prepare_with_invalid_settings_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: Path, settings: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no network on any machine
    with pytest.raises(UsageError) as raised:
        load_search_file(search).bind_settings(settings).call_prepare()
    assert str(raised.value).removeprefix("the settings of ").startswith(f"{search}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
