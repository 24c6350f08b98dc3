"""Make known mistakes in the protocols of a run, each of which some simulated life must reveal.

The mistakes are patches in the folder `mutants`. Each begins with a sentence about it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
MUTANTS = sorted(Path(__file__).with_name("mutants").glob("*.patch"))


def find_failure(mutant: Path, lives: int, jobs: int) -> str:
    """Run lives with a mistake until one fails, and return the line about it; "" if none fails."""
    with tempfile.TemporaryDirectory() as folder:
        for package in ("hpo", "tests/simulator"):
            shutil.copytree(_ROOT / package, Path(folder, package))
        Path(folder, "tests/__init__.py").touch()
        subprocess.run(["git", "apply", str(mutant)], cwd=folder, check=True)
        options = ["--lives", str(lives), "--jobs", str(jobs), "--until-failure"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulator", *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    if not any(" lives, " in line for line in lines):
        raise RuntimeError(done.stderr)
    return next((line for line in lines if line.startswith("life ")), "")


def run_mutants(lives: int, jobs: int) -> int:
    """Print what reveals each mistake, and return how many mistakes nothing reveals."""
    missed = 0
    for mutant in MUTANTS:
        sentence = mutant.read_text().partition("\n")[0]
        failure = find_failure(mutant, lives, jobs)
        missed += not failure
        print(f"{sentence} {failure or 'NOT FOUND'}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mistakes were found")
    return missed
