"""Read the documented job script, and the results of jobs on the simulated cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cluster.simulation import NODES
from tests.support.launch import ROOT
from tests.support.run_output import find_complete_losses, load_trials

PMI = {"SLURM_MPI_TYPE": "pmi2"}  # MPICH


def read_documented_script(page: str) -> str:
    """Return the job script for SLURM on a page of the documentation, for these nodes."""
    text = (ROOT / "docs" / "operation" / page).read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.DOTALL)
    assert script
    assert script[1].count("--nodes=4") == 1
    return script[1].replace("--nodes=4", f"--nodes={len(NODES)}")


def shorten(script: str, evaluations: int, seconds: float) -> str:
    """Return a documented job script with another budget."""
    assert script.count("--evaluations 500") == 1
    return script.replace(
        "--evaluations 500", f"--evaluations {evaluations} --set seconds={seconds}"
    )


def count_complete(run_dir: Path) -> int:
    return len(find_complete_losses(load_trials(run_dir)))


def read_summary(run_dir: Path) -> dict[str, int]:
    evaluations: dict[str, int] = json.loads((run_dir / "summary.json").read_text())["evaluations"]
    return evaluations
