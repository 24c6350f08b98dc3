"""Run the job scripts of the documentation in a simulated SLURM cluster, as they are printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cluster.job_results import (
    PMI,
    count_complete,
    read_documented_script,
    read_summary,
    shorten,
)
from tests.cluster.simulation import NODES, SlurmCluster, wait_until
from tests.support.docs import example
from tests.support.launch import ROOT, find_open_mpi
from tests.support.run_output import find_complete_losses, load_trials, parse_lines

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(420)]


def make_script(*options: object, before: str = "", **settings: object) -> str:
    """Return a short job script that runs the search of the tests."""
    words = [
        *options,
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]
    return (
        '#!/bin/bash\n. "$HOME/venvs/hpo/bin/activate"\n'
        f"{before}srun --kill-on-bad-exit=1 hpo search my_search.py {' '.join(map(str, words))}\n"
        'echo "status $?"\n'
    )


def test_documented_script_spends_its_budget(cluster: SlurmCluster) -> None:
    cluster.submit(read_documented_script("clusters.md"), **PMI)
    output = cluster.wait_for_jobs(300)
    run_dir = cluster.folder / "runs" / "my_search"
    assert "500 evaluations on 12 ranks, 3 workers of 4, 2 islands, 3 hosts" in output
    assert "several hosts" not in output
    assert (read_summary(run_dir)["complete"], count_complete(run_dir)) == (500, 500)


def test_documented_script_resubmits_itself(cluster: SlurmCluster) -> None:
    """Each job gets SIGUSR1 before its time limit, and submits the next one."""
    script = read_documented_script("clusters.md").replace("USR1@120", "USR1@40")
    cluster.submit(shorten(script, evaluations=60, seconds=4), SBATCH_TIMELIMIT="1", **PMI)
    output = cluster.wait_for_jobs(400)
    jobs = re.findall(r"my_search: 60 evaluations on 12 ranks", output)
    assert len(jobs) > 2
    assert output.count("Stopped: SIGUSR1") == len(jobs) - 1
    assert read_summary(cluster.folder / "runs" / "my_search")["complete"] == 60
    assert len({line["params"] for line in parse_lines(output)}) == 60


def test_written_script_spends_its_budget(cluster: SlurmCluster) -> None:
    numbers = ["--nodes", 3, "--gpus-per-node", 2, "--cpus-per-rank", 4, "--time", "10m"]
    search = ["my_search.py", "--", "--evaluations", "20"]
    script = cluster.run("hpo", "slurm-script", *numbers, *search).stdout
    cluster.submit(script, name="my_search.sh")
    output = cluster.wait_for_jobs(150, "my_search.sh.out")
    assert "20 evaluations on 6 ranks, 3 workers of 2, 2 islands, 3 hosts" in output
    assert read_summary(cluster.folder / "runs" / "my_search")["complete"] == 20


def test_scancel_stops_run_without_resubmission(cluster: SlurmCluster) -> None:
    job = cluster.submit(read_documented_script("clusters.md"), **PMI)
    wait_until(lambda: "5/500" in cluster.read_output(), 100, cluster.read_output)
    assert cluster.run("scancel", job).returncode == 0
    output = cluster.wait_for_jobs(60)
    printed = {line["params"] for line in parse_lines(output)}
    assert 5 <= len(printed) < 500
    assert count_complete(cluster.folder / "runs" / "my_search") >= len(printed)


def test_preempted_job_resumes(cluster: SlurmCluster) -> None:
    """SLURM sends SIGTERM, and SIGKILL after the partition's GraceTime.

    The run stops before, and submits itself.
    """
    cluster.submit(shorten(read_documented_script("clusters.md"), evaluations=30, seconds=1), **PMI)
    wait_until(lambda: len(parse_lines(cluster.read_output())) > 3, 100, cluster.read_output)
    done = cluster.run(
        "srun", "--partition=urgent", "--nodes=3", "--exclusive", "hostname", timeout=100
    )
    assert sorted(done.stdout.split()) == list(NODES), done.stderr
    output = cluster.wait_for_jobs(200)
    assert output.count("30 evaluations on 12 ranks") == 2
    assert output.count("Stopped: SIGTERM") == 1
    assert read_summary(cluster.folder / "runs" / "my_search")["complete"] == 30


def test_job_array_runs_are_independent(cluster: SlurmCluster) -> None:
    """Several jobs are on one node at the same time, each with its own run."""
    script = make_script(
        "--run-dir run-$SLURM_ARRAY_TASK_ID --evaluations 10 --seed $SLURM_ARRAY_TASK_ID"
    )
    cluster.submit(script, "--array=0-3", "--nodes=1", "--ntasks=2", "--cpus-per-task=4", **PMI)
    output = cluster.wait_for_jobs(150)
    assert output.count("status 0") == 4
    best = [
        sorted(find_complete_losses(load_trials(cluster.folder / f"run-{index}")).values())
        for index in range(4)
    ]
    assert {len(losses) for losses in best} == {10}
    assert len({losses[0] for losses in best}) == 4


@pytest.mark.parametrize(
    ("options", "spans"),
    [
        (["--ntasks=6"], True),  # 4, 1 and 1 ranks
        (["--ntasks=6", "--distribution=cyclic"], True),
        (["--ntasks-per-node=2", "--distribution=cyclic"], False),
        (["--ntasks-per-node=2", "--distribution=plane=1"], False),
    ],
)
def test_workers_are_on_one_node_if_possible(
    cluster: SlurmCluster, options: list[str], spans: bool
) -> None:
    search = [
        "hpo",
        "search",
        "my_search.py",
        "--ranks-per-worker",
        2,
        "--evaluations",
        6,
        "--run-dir",
        "run",
    ]
    job = cluster.run("srun", "--mpi=pmi2", "--nodes=3", *options, *search, timeout=100)
    assert job.returncode == 0, job.stderr
    assert "6 ranks, 3 workers of 2, 2 islands, 3 hosts" in job.stdout
    assert ("\n1 worker of 3 spans several hosts. To avoid this" in job.stdout) == spans
    assert ("several hosts" in job.stdout) == spans
    assert read_summary(cluster.folder / "run")["complete"] == 6


def test_script_for_torchrun_is_searched_by_srun(cluster: SlurmCluster) -> None:
    """As docs/training/ways.md shows it, with the script of docs/training/scripts.md."""
    script = example("docs/training/scripts.md", "train.py")
    (cluster.folder / "train.py").write_text(script, "utf-8")
    options = ["--space", "lr=Float(1e-3, 1e-1, log=True)", "--loss", r"val_loss=(\S+)"]
    search = ["hpo", "search", *options, "--evaluations", 6, "--run-dir", "run", "--", "train.py"]
    job = cluster.run("srun", "--mpi=pmi2", "--nodes=2", "--ntasks=4", *search, timeout=200)
    assert job.returncode == 0, job.stderr
    assert "6 evaluations on 4 ranks, 2 workers of 2, 2 islands, 2 hosts" in job.stdout
    assert len(find_complete_losses(load_trials(cluster.folder / "run"))) == 6


def test_worker_spans_nodes(cluster: SlurmCluster) -> None:
    search = [
        "hpo",
        "search",
        "my_search.py",
        "--ranks-per-worker",
        6,
        "--evaluations",
        4,
        "--run-dir",
        "run",
    ]
    job = cluster.run(
        "srun", "--mpi=pmi2", "--nodes=3", "--ntasks-per-node=2", *search, timeout=100
    )
    assert job.returncode == 0, job.stderr
    assert "1 worker of 1 spans several hosts\n" in job.stdout
    assert read_summary(cluster.folder / "run")["complete"] == 4


def test_open_mpi_starts_with_pmix(cluster: SlurmCluster) -> None:
    python = find_open_mpi().python
    search = [ROOT / "run_islands.py", "my_search.py", "--evaluations", 6, "--run-dir", "run"]
    job = cluster.run(
        "srun", "--mpi=pmix", "--nodes=3", "--ntasks-per-node=2", python, *search, timeout=150
    )
    assert job.returncode == 0, job.stderr
    assert "6 ranks, 3 workers of 2, 2 islands, 3 hosts" in job.stdout
    assert read_summary(cluster.folder / "run")["complete"] == 6


def test_wrong_mpi_type_is_explained(cluster: SlurmCluster) -> None:
    search = ["hpo", "search", "my_search.py", "--evaluations", 2, "--run-dir", "run"]
    job = cluster.run("srun", "--mpi=none", "--nodes=2", "--ntasks=4", *search, timeout=100)
    assert job.returncode == 2
    assert (
        job.stderr.count(
            "error: 4 ranks were started (SLURM_STEP_NUM_TASKS=4), and mpi4py finds 1: srun must"
        )
        == 1
    )
    assert "Use srun --mpi=pmi2 for MPICH" in job.stderr
    assert not (cluster.folder / "run").exists()


def test_cluster_leaves_nothing(missing_requirement: str) -> None:
    if missing_requirement:
        pytest.skip(missing_requirement)
    with SlurmCluster() as cluster:
        folder = cluster.folder
        cluster.kill_node("n2")
        assert cluster.run(sys.executable, "-c", "print(1)", on="n1").stdout == "1\n"
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder) in _read(path)]
    assert not running


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # The process has ended.
        return ""
