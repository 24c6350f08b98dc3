"""Test simulated lives of runs, in processes in which a stand-in replaces mpi4py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.mistakes import MUTANTS, find_failure
from tests.support.launch import ROOT
from tests.support.limits import scale


def simulate(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *map(str, options)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=scale(300),
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 50, 100])
def test_lives_keep_all_promises(first: int) -> None:
    done = simulate("--lives", 50, "--first", first, "--jobs", 1)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.fullmatch(
        r"50 lives, \d{3,} evaluations and \d+ steps in \d+ s; 0 failed\n", done.stdout
    )


@pytest.mark.slow
def test_seed_decides_all_that_happens() -> None:
    first, again, other = (simulate("--show", seed).stdout for seed in (7, 7, 1))
    traces = re.findall(r"trace (\w{16})", first)
    assert len(traces) > 1
    assert re.findall(r"trace (\w{16})", again) == traces
    assert set(re.findall(r"trace (\w{16})", other)).isdisjoint(traces)
    assert first.endswith("\nNothing is wrong.\n")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.stem)
def test_known_mistakes_fit_the_code(mutant: Path) -> None:
    assert mutant.read_text().partition("\n")[0].endswith(".")
    subprocess.run(["git", "apply", "--check", str(mutant)], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("running-trials-do-not-count-against-the-budget", "individuals were evaluated"),
        ("a-stopped-evaluation-counts-as-failed", r"failed: rank \d: the run stops"),
    ],
)
def test_known_mistake_is_found(name: str, failure: str) -> None:
    (mutant,) = (one for one in MUTANTS if one.stem == name)
    assert re.search(failure, find_failure(mutant, lives=200, jobs=1))
