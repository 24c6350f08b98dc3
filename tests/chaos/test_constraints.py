"""Test runs whose constraints crash the process that checks them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.launch import PROGRAM, Mpi
from tests.support.run_output import find_complete_losses, load_trials, remove_loading_lines

CRASHING = """
import os
from pathlib import Path
from hpo import Int, SearchSpace

space = SearchSpace(a=Int(1, 9), b=Int(1, 9))
begun = Path("begun")


def differ(params):
    count = len(begun.read_text()) if begun.exists() else 0
    if count >= 4 or (count == 2 and not Path("crashed").exists()):
        Path("crashed").touch()
        os.kill(os.getpid(), 11)
    return params["a"] != params["b"]


def objective(params, worker):
    with begun.open("a") as file:
        file.write("x")
    return params["a"]


space.require(differ, "a differs from b")
"""


def test_run_with_constraint_that_crashes_first_is_refused(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "begun").write_text("xxxx")
    (tmp_path / "my_search.py").write_text(CRASHING)
    job = mpi.run(2, PROGRAM, "my_search.py", "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.startswith(
        "error: the constraints of the search space cannot be evaluated: the trainer was ended by "
        "SIGSEGV"
    )
    assert job.stderr.count("error:") == 1
    assert not (tmp_path / "run").exists()


def test_run_with_constraint_that_crashes_twice_ends(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_search.py").write_text(CRASHING)
    options = ["--ranks-per-worker", 1, "--run-dir", "run", "--evaluations", 9]
    job = mpi.run(1, PROGRAM, "my_search.py", *options, cwd=tmp_path)
    assert job.returncode == 1
    assert re.findall("^error: .*", job.stderr, re.MULTILINE) == [
        "error: the constraints of the search space cannot be evaluated: the trainer was ended by "
        "SIGSEGV"
    ]
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 4, (
        "checked again after the first crash"
    )
