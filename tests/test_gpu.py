"""Test that a failure on a GPU fails one evaluation, and frees the memory.

`make test-gpu` runs these tests on a machine with GPUs.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials

GPU = SEARCHES / "gpu.py"
WAYS = ["none", "assert", "none", "address", "none", "memory", "none", "kill", "none"]


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.skipif(count_gpus() == 0, reason="no GPU")]


def search(mpi: Mpi, folder: Path, ranks: int) -> list[list[dict[str, object]]]:
    """Run one evaluation for each way to fail, on one worker. Return the notes of each evaluation, one per rank."""
    (folder / "given.json").write_text(json.dumps([{"k": k} for k in range(len(WAYS))]))
    arguments: list[object] = [PROGRAM, GPU, "--run-dir", "run", "--islands", 1, "--ranks-per-worker", ranks]
    arguments += ["--enqueue", "given.json"]
    arguments += ["--evaluations", len(WAYS), "--set", f"ways={','.join(WAYS)}", "--set", f"folder={folder}"]
    visible = ",".join(map(str, range(count_gpus())))
    victim = Victim(mpi, ranks, arguments, folder, folder / "log", {"CUDA_VISIBLE_DEVICES": visible})
    status, errors = victim.wait(300)
    assert status == 0, errors
    seen = [
        [json.loads((folder / f"{k}-0-{rank}.json").read_text()) for rank in range(ranks)] for k in range(len(WAYS))
    ]
    trials = load_trials(folder / "run")
    assert [trial.state.name for trial in trials] == ["COMPLETE" if way == "none" else "FAIL" for way in WAYS]
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_failure_costs_one_evaluation_and_frees_memory(mpi: Mpi, tmp_path: Path, ranks: int) -> None:
    seen = search(mpi, tmp_path, ranks)
    free = [min(int(str(one["free"])) for one in of_ranks) for of_ranks in seen]
    most = int(str(seen[0][0]["total"]))
    assert min(free) > max(free) - 0.05 * most, f"what has failed still holds memory: {free}"


def test_backend_is_nccl_for_gpus_of_their_own_alone(mpi: Mpi, tmp_path: Path) -> None:
    (of_ranks, *_) = search(mpi, tmp_path, 2)
    alone = count_gpus() >= 2
    assert [one["backend"] for one in of_ranks] == ["nccl" if alone else "gloo"] * 2
    assert len({one["uuid"] for one in of_ranks}) == (2 if alone else 1)
    if alone:
        assert [one["device"] for one in of_ranks] == [f"cuda:{one['local']}" for one in of_ranks]


def test_template_has_no_cuda_context(mpi: Mpi, tmp_path: Path) -> None:
    arguments: list[object] = [
        PROGRAM,
        GPU,
        "--run-dir",
        "run",
        "--islands",
        1,
        "--evaluations",
        20,
        "--set",
        f"folder={tmp_path}",
    ]
    arguments += ["--set", f"ways={','.join(['none'] * 100)}"]
    visible = ",".join(map(str, range(count_gpus())))
    victim = Victim(mpi, 1, arguments, tmp_path, tmp_path / "log", {"CUDA_VISIBLE_DEVICES": visible})
    victim.wait_for(" 2/20 ")
    (template,) = victim.find_templates()
    maps = Path(f"/proc/{template}/maps").read_text()
    opened = [str(path.readlink()) for path in Path(f"/proc/{template}/fd").iterdir()]
    victim.kill("all", random.Random(0))
    victim.wait()
    assert "/dev/nvidia" not in maps
    assert not [path for path in opened if path.startswith("/dev/nvidia") and path != "/dev/nvidiactl"]
