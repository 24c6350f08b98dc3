"""Test the variables of GPUs on the ranks of a job, with GPUs that are pretended."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launch import PROGRAMS, Mpi


def test_elastic_worker_returns_to_its_own_gpus(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(2, PROGRAMS / "gpu_groups.py", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    found = {line["rank"]: line["found"] for line in map(json.loads, job.stdout.splitlines())}
    assert found == {
        0: [["7,5", [0, 1]], ["7,3,5,1", [0, 2]], ["7,5", [0, 1]]],
        1: [["3,1", [0, 1]], ["7,3,5,1", [1, 3]], ["3,1", [0, 1]]],
    }
