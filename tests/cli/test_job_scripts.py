"""Test the job scripts that hpo writes. tests/cluster runs the script for SLURM."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.launch import Hpo
from tests.support.limits import scale


def check_syntax(script: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=scale(20)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("my search.py").write_text("space = SearchSpace()\n")
    return "my search.py"


def test_slurm_script_requests_its_options(
    hpo: Hpo, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADEDMODULES", "python/3.12:openmpi/5.0")
    numbers = ["--nodes", 4, "--gpus-per-node", 4, "--cpus-per-rank", 8, "--time", "1d1h30m"]
    names = ["--partition", "gpu", "--account", "me", "--directive=--qos=high"]
    chosen = ["--", "--ranks-per-worker", 4, "--evaluations", 500]
    status, script, err = hpo("slurm-script", search, *numbers, *names, *chosen)
    assert (status, err) == (0, "")
    check_syntax(script)
    directives = [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert directives == [
        *(
            "job-name=my_search",
            "nodes=4",
            "ntasks-per-node=4",
            "gpus-per-node=4",
            "cpus-per-task=8",
        ),
        *("time=25:30:00", "signal=USR1@120", "requeue", "no-kill"),
        *("partition=gpu", "account=me", "qos=high"),
    ]
    assert "\nmodule load python/3.12 openmpi/5.0\n" in script
    assert (
        "hpo search 'my search.py' --ranks-per-worker 4 --evaluations 500 --run-dir "
        "runs/my_search --resume\n" in script
    )
    assert script.endswith("\nif [ $? -eq 75 ]; then sbatch my_search.sh; fi\n")


@pytest.mark.parametrize(("gpus", "cores"), [([], 1), (["--gpus-per-node", 2], 4)])
def test_job_script_has_more_cores_for_ranks_with_gpus(
    hpo: Hpo, search: str, gpus: list[object], cores: int
) -> None:
    _, script, _ = hpo("slurm-script", search, "--ranks-per-node", 2, *gpus, "--time", "1h")
    assert f"\n#SBATCH --cpus-per-task={cores}\n" in script
    _, script, _ = hpo("pbs-script", search, "--ranks-per-node", 2, *gpus, "--time", "1h")
    assert f":ncpus={2 * cores}:mpiprocs=2" in script


def test_slurm_script_shares_the_cores_of_a_node(
    hpo: Hpo, search: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\necho '128+|gpu:a100:4(S:0-1)'\necho '96|gpu:8'\necho '4|(null)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sinfo.parent}:/usr/bin:/bin")
    _, script, _ = hpo("slurm-script", search, "--gpus-per-node", 2, "--time", "1h")
    assert "\n#SBATCH --cpus-per-task=12\n" in script, "the least share of a GPU"
    _, script, err = hpo("slurm-script", search, "--partition", "big", "--time", "1h")
    assert (
        "nodes of partition big have GPUs, and the job requests none. Give --gpus-per-node" in err
    )
    assert "\n#SBATCH --cpus-per-task=1\n" in script
    none = ["--gpus-per-node", 2, "--ranks-per-node", 0]
    status, _, err = hpo("slurm-script", search, *none, "--time", "1h")
    assert (status, "at least 1, got 0" in err) == (2, True)


def test_training_script_is_no_search_space(hpo: Hpo, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for epoch in range(3):\n    print('loss', epoch)\n")
    status, out, err = hpo("slurm-script", script, "--time", "1h")
    assert (status, out) == (2, "")
    assert f"must be a file with a `space`, got {script}. A training script follows after --" in err
    script.write_text("from searches import *\n")
    assert hpo("slurm-script", script, "--time", "1h")[0] == 0


@pytest.mark.usefixtures("search")
def test_job_script_runs_a_program(hpo: Hpo) -> None:
    options = ["--run-dir", "here", "--loss", "loss (.*)", "--space", "lr=Float(0.1, 1.0)"]
    program = ["--", "train.py", "--epochs", "3"]
    Path("train.py").touch()
    status, script, err = hpo(
        "pbs-script", "--time", "1h", "--account=me", "--", *options, *program
    )
    assert status == 0
    assert (
        "hpo search --run-dir here --loss 'loss (.*)' --space 'lr=Float(0.1, 1.0)' --resume -- "
        "train.py --epochs 3\n"
    ) in script
    assert "\n#PBS -A me\n" in script
    assert "64 evaluations for 1 worker. They fill the time of a job if one takes 56.2 s" in err


def test_pbs_script_stops_before_its_time_limit(hpo: Hpo, search: str) -> None:
    status, script, _ = hpo(
        "pbs-script", search, "--nodes", 3, "--ranks-per-node", 2, "--time", "1h"
    )
    assert status == 0
    check_syntax(script)
    assert "#PBS -l select=3:ncpus=2:mpiprocs=2\n#PBS -l walltime=1:00:00\n" in script
    assert 'hpo supervise mpirun -f "$PBS_NODEFILE" -n 6 ' in script
    assert "\nexport HPO_JOB_END_TIME=$(($(date +%s) + 3540))\n" in script, (
        "the run stops a minute before"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "1m"], "--time must be at least 10m, got 60 s"),
        (["--time", "1h", "--nodes", "0"], "--nodes must be at least 1, got 0"),
        (["--time", "1h", "--gpus-per-node", "-1"], "--gpus-per-node must be at least 0, got -1"),
        (
            ["--time", "1h", "--ranks-per-node", "3", "--", "--ranks-per-worker", "2"],
            "3 ranks cannot be divided into workers",
        ),
        (["--time", "1h", "--directive", "qos"], "--directive must be an option, such as --qos"),
        (["--time", "1h", "--partitio", "x"], "(see hpo slurm-script --help)"),
        (["--time", "1h", "--", "--evaluation", "3"], "(see hpo search --help)"),
        ([], "Missing option '--time'"),
    ],
)
def test_job_script_of_wrong_request_is_refused(
    hpo: Hpo, search: str, arguments: list[str], message: str
) -> None:
    status, out, err = hpo("slurm-script", search, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_job_script_of_missing_search_file_is_refused(hpo: Hpo, search: str) -> None:
    assert hpo("slurm-script", "mnist_cnn", "--time", "1h")[0] == 0, "a search space of the package"
    status, _, err = hpo("pbs-script", f"other {search}", "--time", "1h")
    assert (status, "got other my search.py" in err) == (2, True)
