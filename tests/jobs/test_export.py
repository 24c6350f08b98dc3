"""Test a run whose standard output is closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.launch import ROOT, SEARCHES
from tests.support.limits import scale


@pytest.mark.mpi
def test_run_with_closed_standard_output_finishes(tmp_path: Path) -> None:
    program, search = str(ROOT / "run_islands.py"), str(SEARCHES / "tiny.py")
    line = [sys.executable, program, search, "--run-dir", "run", "--evaluations", "2"]
    closed = partial(os.close, 1)
    job = subprocess.run(
        line, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=scale(100), preexec_fn=closed
    )
    assert (job.returncode, job.stderr) == (0, "")
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["evaluations"]["complete"] >= 1
    )
