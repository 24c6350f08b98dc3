"""The examples in README.md and docs/ are run as they are written there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from tests.conftest import ROOT, Mpi
from tests.outcome import finished, trials_of

PROGRAM = ROOT / "run_islands.py"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_own_model_of_the_readme_runs_as_written(mpi: Mpi, tmp_path: Path) -> None:
    example = blocks("README.md", "python")[0]
    assert example == blocks("docs/own-model.md", "python")[0]
    (tmp_path / "my_search.py").write_text(example, "utf-8")
    command = [PROGRAM, "my_search.py", "--set", "epochs=3", "--islands", 1, "--evaluations", 3, "--run-dir", "run"]
    job = mpi.run(2, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    losses = finished(trials_of(tmp_path / "run")).values()
    assert len(losses) == 3
    assert min(losses) < 2.2, "it learns: chance is 2.3"


def test_the_worked_example_runs_as_written(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_images.py").write_text(blocks("docs/own-model.md", "python")[1], "utf-8")
    make_images(tmp_path / "images")
    torch.save(resnet18().state_dict(), tmp_path / "resnet18.pth")
    settings = ["--set", "weights=resnet18.pth", "--set", "epochs=1", "--set", "batch_size=4"]
    command = [PROGRAM, "my_images.py", *settings, "--islands", 1, "--evaluations", 1, "--run-dir", "run"]
    job = mpi.run(2, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert len(finished(trials_of(tmp_path / "run"))) == 1


def make_images(folder: Path) -> None:
    """Make dark and light images: 5 of each to train with, which no number of ranks divides, and 3 to validate."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 3)):
        for name, least in (("dark", 0), ("light", 100)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(least, least + 156, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


@pytest.mark.parametrize("script", blocks("docs/cluster.md", "bash") + blocks("docs/tutorial.md", "bash"))
def test_scripts_are_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=10)
    assert (checked.returncode, checked.stderr) == (0, "")
