"""Test that evaluations of a resumed run keep their seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import PROGRAM, SEARCHES, Hpo, Mpi
from tests.support.run_output import load_trials

NOISY = SEARCHES / "noisy.py"


def test_show_prints_the_seed_of_the_trial(mpi: Mpi, hpo: Hpo, tmp_path: Path) -> None:
    import torch

    for seed, evaluations in ((3, 2), (5, 4)):
        arguments = [
            PROGRAM,
            NOISY,
            "--run-dir",
            "run",
            "--resume",
            "--seed",
            seed,
            "--evaluations",
            evaluations,
        ]
        job = mpi.run(2, *arguments, cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, "")
    assert "--seed was 3 before, and is 5 now: losses may not be comparable" in job.stdout
    for trial, seed in zip(load_trials(tmp_path / "run"), (3, 3, 5, 5), strict=True):
        shown = json.loads(hpo("show", tmp_path / "run", trial.number, "--json")[1])
        assert shown["seed"] == seed
        noise = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
        assert trial.values[0] == pytest.approx(trial.params["x"] + noise)
