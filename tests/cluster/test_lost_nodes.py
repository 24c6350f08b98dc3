"""Lose nodes of a simulated cluster during a run: it costs their evaluations, but not the run."""

from __future__ import annotations

import re
import shutil
import sys
import time

import pytest

from tests.cluster.job_results import (
    PMI,
    count_complete,
    read_documented_script,
    read_summary,
    shorten,
)
from tests.cluster.simulation import NODES, SlurmCluster, wait_until
from tests.support.launch import ROOT, find_open_mpi
from tests.support.run_output import load_trials, parse_lines

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(420)]


def submit_with_two_ranks_per_node(cluster: SlurmCluster, evaluations: int) -> str:
    """Submit the documented script, with two ranks per node, and wait for first results."""
    script = shorten(read_documented_script("clusters.md"), evaluations, seconds=3)
    script = script.replace("--evaluations", "--checkpoint-every 1s --evaluations")
    script = script.replace("--ranks-per-worker 4", "--ranks-per-worker 2")
    job = cluster.submit(script.replace("--ntasks-per-node=4", "--ntasks-per-node=2"), **PMI)
    wait_until(lambda: len(parse_lines(cluster.read_output())) >= 6, 100, cluster.read_output)
    time.sleep(2)  # The running evaluations save their first checkpoints.
    return job


def check_run_is_whole(cluster: SlurmCluster, evaluations: int) -> None:
    run_dir = cluster.folder / "runs" / "my_search"
    assert read_summary(run_dir)["complete"] == count_complete(run_dir) == evaluations
    params = [trial.params["x"] for trial in load_trials(run_dir) if trial.values]
    assert len(set(params)) == evaluations


def test_run_continues_without_lost_node(cluster: SlurmCluster) -> None:
    submit_with_two_ranks_per_node(cluster, evaluations=24)
    cluster.kill_node("n3")
    output = cluster.wait_for_jobs(120)
    assert re.search(
        r"\nhpo supervise: the job ended with status \d+, after \d+ evaluations, in "
        r"(trial \d+|trials \d+(, \d+)+); "
        r"n3 does not answer; restarting it with 4 ranks on n1, n2\n",
        output,
    )
    assert "24 evaluations on 4 ranks, 2 workers of 2, 2 islands, 2 hosts" in output
    assert "may have crashed the job" not in output, "no evaluation is suspected"
    check_run_is_whole(cluster, 24)
    trials = load_trials(cluster.folder / "runs" / "my_search")
    assert any(trial.user_attrs.get("resumed_from_step") for trial in trials), (
        "they continue from their checkpoints"
    )


def test_job_whose_batch_host_is_lost_is_requeued(cluster: SlurmCluster) -> None:
    """A step on another node notices it. The job starts again as soon as SLURM has enough nodes."""
    job = submit_with_two_ranks_per_node(cluster, evaluations=24)
    cluster.kill_node("n1")
    wait_until(lambda: "PENDING" in cluster.list_jobs(), 120, cluster.read_logs)
    cluster.start_node("n1")
    output = cluster.wait_for_jobs(200)
    assert "Restarts=1 " in cluster.run("scontrol", "show", "job", job).stdout
    assert output.count("24 evaluations on 6 ranks, 3 workers of 2, 2 islands, 3 hosts") == 2
    check_run_is_whole(cluster, 24)


@pytest.mark.parametrize("option", ["-hosts", "-f"])
def test_mpirun_continues_without_lost_host(cluster: SlurmCluster, option: str) -> None:
    """It connects to the hosts by ssh. When the lost host is back, the next start uses it again."""
    (cluster.folder / "hosts.txt").write_text("".join(f"{node}:2\n" for node in NODES))
    hosts = ",".join(NODES) if option == "-hosts" else "hosts.txt"
    mpirun = [
        shutil.which("mpirun"),
        option,
        hosts,
        "-ppn",
        2,
        "-n",
        6,
        sys.executable,
        ROOT / "run_islands.py",
    ]
    search = [
        "my_search.py",
        "--run-dir",
        "run",
        "--evaluations",
        60,
        "--set",
        "seconds=1",
        "--islands",
        3,
    ]
    job = cluster.start("hpo", "supervise", *mpirun, *search, on="n1")
    wait_until(lambda: len(parse_lines(cluster.read_output("n1.out"))) >= 6, 100, cluster.read_logs)
    cluster.kill_node("n2")
    message = "; n2 does not answer; restarting it with 4 ranks on n1, n3"
    wait_until(
        lambda: message in cluster.read_output("n1.out"), 100, lambda: cluster.read_output("n1.out")
    )
    cluster.start_node("n2")
    wait_until(
        lambda: "resumed after" in cluster.read_output("n1.out"),
        60,
        lambda: cluster.read_output("n1.out"),
    )
    done = len(parse_lines(cluster.read_output("n1.out")))
    wait_until(
        lambda: len(parse_lines(cluster.read_output("n1.out"))) >= done + 4, 60, cluster.read_logs
    )
    cluster.kill_node("n3")
    assert job.wait(200) == 0
    output = cluster.read_output("n1.out")
    assert "; n3 does not answer; restarting it with 4 ranks on n1, n2" in output
    assert output.count("4 ranks, 2 workers of 2, 2 islands, 2 hosts") == 2, (
        "an option for 3 islands is changed"
    )
    assert read_summary(cluster.folder / "run")["complete"] == 60


def test_open_mpi_continues_without_lost_host(cluster: SlurmCluster) -> None:
    mpi = find_open_mpi()
    # With --oversubscribe, all ranks would be on the first host.
    hosts = ["--host", ",".join(f"{node}:2" for node in NODES), "-n", 6, "--allow-run-as-root"]
    search = ["my_search.py", "--run-dir", "run", "--evaluations", 30, "--set", "seconds=1"]
    job = cluster.start(
        "hpo",
        "supervise",
        mpi.mpirun,
        *hosts,
        mpi.python,
        ROOT / "run_islands.py",
        *search,
        on="n1",
    )
    wait_until(lambda: len(parse_lines(cluster.read_output("n1.out"))) >= 6, 100, cluster.read_logs)
    cluster.kill_node("n2")
    assert job.wait(200) == 0, cluster.read_output("n1.out")
    output = cluster.read_output("n1.out")
    assert "30 evaluations on 6 ranks, 3 workers of 2, 2 islands, 3 hosts" in output
    assert "; n2 does not answer; restarting it with 4 ranks on n1, n3" in output
    assert output.count("30 evaluations on 4 ranks, 2 workers of 2, 2 islands, 2 hosts") == 1
    assert read_summary(cluster.folder / "run")["complete"] == 30


def test_node_that_restarts_quickly_is_used_again(cluster: SlurmCluster) -> None:
    """SLURM does not find it down, so srun waits forever: hpo supervise ends srun."""
    submit_with_two_ranks_per_node(cluster, evaluations=24)
    cluster.kill_node("n3")
    time.sleep(3)
    cluster.start_node("n3")
    output = cluster.wait_for_jobs(250)
    assert output.count("24 evaluations on 6 ranks, 3 workers of 2, 2 islands, 3 hosts") == 2
    assert output.count("hpo supervise: the job ended with status") == 1
    check_run_is_whole(cluster, 24)
