"""Test which cores and GPUs of a node trainers get if SLURM gives each task its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.simulation import SlurmCluster

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SEARCH = """
import json
import os
import socket
from pathlib import Path

import torch

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


def objective(params, worker):
    seen = {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cgroups": Path("/proc/self/cgroup").read_text(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    Path(f"seen-{worker.index}-{worker.rank}").write_text(json.dumps(seen))
    return params["x"]
"""


@pytest.fixture
def binding_cluster(missing_requirement: str) -> Iterator[SlurmCluster]:
    """Yield a cluster that binds tasks to cores.

    Each rank of its search writes what its trainer may use.
    """
    if missing_requirement:
        pytest.skip(missing_requirement)
    with SlurmCluster(binds_cores=True) as simulated:
        (simulated.folder / "seeing.py").write_text(SEARCH)
        yield simulated


def run_search(cluster: SlurmCluster, *options: object) -> list[dict[str, Any]]:
    """Return what the trainer of each rank may use, in the order of workers and their ranks."""
    search = ["hpo", "search", "seeing.py", "--evaluations", 6, "--run-dir", "run"]
    job = cluster.run("srun", "--mpi=pmi2", "--nodes=2", *options, *search, timeout=100)
    assert (job.returncode, job.stderr) == (0, "")
    return [json.loads(path.read_text()) for path in sorted(cluster.folder.glob("seen-*"))]


@pytest.mark.skipif(
    (os.cpu_count() or 1) < 2, reason="two tasks cannot have cores of their own on one core"
)
def test_trainers_use_the_cores_of_their_task(binding_cluster: SlurmCluster) -> None:
    seen = run_search(
        binding_cluster, "--ntasks-per-node=2", "--cpus-per-task=1", "--cpu-bind=cores"
    )
    assert [(one["host"], one["threads"]) for one in seen] == [
        ("n1", 1),
        ("n1", 1),
        ("n2", 1),
        ("n2", 1),
    ]
    first, second, *others = [one["cores"] for one in seen]
    assert len(first) == len(second) == 1
    assert first != second
    assert others == [first, second]
    if binding_cluster.has_cgroups:
        assert all(f"/slurm_{one['host']}/" in one["cgroups"] for one in seen)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a task cannot have two cores")
def test_trainer_of_task_with_two_cores_uses_two_threads(
    binding_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # The tests set it to 1.
    options = ["--ntasks-per-node=1", "--cpus-per-task=2", "--cpu-bind=cores"]
    seen = run_search(binding_cluster, *options)
    assert [(one["host"], len(one["cores"]), one["threads"]) for one in seen] == [
        ("n1", 2, 2),
        ("n2", 2, 2),
    ]


def test_trainers_see_the_gpu_of_their_task(cluster: SlurmCluster) -> None:
    (cluster.folder / "seeing.py").write_text(SEARCH)
    seen = run_search(cluster, "--ntasks-per-node=2", "--gpus-per-task=1")
    assert [(one["host"], one["gpus"]) for one in seen] == [
        ("n1", "0"),
        ("n1", "1"),
        ("n2", "0"),
        ("n2", "1"),
    ]


def test_two_jobs_on_one_node_see_other_gpus(cluster: SlurmCluster) -> None:
    """Both jobs run at the same time, in the same directory, each with its own run."""
    (cluster.folder / "seeing.py").write_text(SEARCH.replace("seen-", "seen-{Path.cwd().name}-"))
    search = "srun --mpi=pmi2 hpo search ../seeing.py --evaluations 40"
    for name in ("first", "second"):
        (cluster.folder / name).mkdir()
        activate = '#!/bin/bash\n. "$HOME/venvs/hpo/bin/activate"'
        script = f'{activate}\ncd {name} && {search}\necho "{name} $?"\n'
        cluster.submit(
            script, "--nodelist=n1", "--ntasks=2", "--gpus-per-task=1", name=f"{name}.sh"
        )
    outputs = [(cluster.wait_for_jobs(150, f"{name}.sh.out"), name) for name in ("first", "second")]
    seen = {}
    for output, name in outputs:
        assert output.endswith(f"{name} 0\n"), output
        seen[name] = [
            json.loads(path.read_text()) for path in sorted((cluster.folder / name).glob("seen-*"))
        ]
    assert {one["host"] for ranks in seen.values() for one in ranks} == {"n1"}
    assert sorted(one["gpus"] for ranks in seen.values() for one in ranks) == ["0", "1", "2", "3"]
