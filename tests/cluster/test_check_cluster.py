"""Test `hpo check-cluster` on several hosts of a simulated cluster."""

from __future__ import annotations

import re
import time

import pytest

from tests.cluster.simulation import NODES, SlurmCluster

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

SRUN = ("srun", "--mpi=pmi2", "--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2")
CHECK = ("hpo", "check-cluster")


def test_check_cluster_describes_three_hosts(cluster: SlurmCluster) -> None:
    began = time.monotonic()
    job = cluster.run(*SRUN, *CHECK)
    assert (job.returncode, job.stderr) == (0, "")
    assert time.monotonic() - began < 60, "it ends within a minute"
    assert job.stdout.startswith("6 ranks, 3 workers of 2, 2 islands, 3 hosts\nMPICH 5")
    assert "; ranks started by srun in SLURM job " in job.stdout
    rows = re.findall(
        r"^ (n\d) +(\d-\d) +(\d) .*?(?: ([+-]\d+\.\d) ± \d+\.\d)?$", job.stdout, re.MULTILINE
    )
    assert [row[:3] for row in rows] == [("n1", "0-1", "0"), ("n2", "2-3", "1"), ("n3", "4-5", "2")]
    assert [abs(float(offset or 0)) < 5 for *_, offset in rows] == [True] * 3, (
        "they are one machine"
    )
    groups = re.findall(
        r"^ ([^\d\n]+?) +(\d) +(\d) +gloo +\S+ +(\S+) +(\S+)$", job.stdout, re.MULTILINE
    )
    assert [group[:3] for group in groups] == [
        ("a worker on one host", "3", "2"),
        ("one rank of each host", "1", "3"),
    ]
    assert all(
        0 < float(latency) < 1000 and 0 < float(bandwidth) < 1000
        for *_, latency, bandwidth in groups
    )
    assert f"ok     A durable write to {cluster.folder} takes" in job.stdout
    assert "all hosts see the same files" in " ".join(job.stdout.split())
    assert not list(cluster.folder.glob(".hpo-check-*"))


def test_check_cluster_finds_folder_that_is_not_shared(cluster: SlurmCluster) -> None:
    job = cluster.run(*SRUN, *CHECK, "--run-dir", "/run/search", timeout=100)
    assert job.returncode == 1, job.stderr
    assert "\nwrong  n2 and n3 do not see the files of n1 in /run\n" in job.stdout
    assert "1 problem" in job.stdout


def test_check_cluster_finds_wrong_network(cluster: SlurmCluster) -> None:
    options = ["--ranks-per-worker", 6, "--collective-timeout", "10s"]
    job = cluster.run(*SRUN, *CHECK, *options, variables={"GLOO_SOCKET_IFNAME": "lo"}, timeout=100)
    assert job.returncode == 1, job.stderr
    words = " ".join(job.stdout.split())
    assert re.search("wrong (1|2) process groups? failed, on n1, n2 and n3: ", words)
    assert "Set the network of the process group: export GLOO_SOCKET_IFNAME=" in words


def test_check_cluster_ends_if_network_drops_packets(cluster: SlurmCluster) -> None:
    """The interface has an address, and what is sent there gets no answer, as behind a firewall."""
    for number, node in enumerate(NODES, start=1):
        neighbours = "".join(
            f" && ip neigh add 192.0.2.{other} lladdr 02:00:00:00:00:01 dev lost0 nud permanent"
            for other in range(1, len(NODES) + 1)
            if other != number
        )
        script = (
            "ip link add lost0 type veth peer name lost1 && ip link set lost0 up && ip link set "
            "lost1 up"
        )
        done = cluster.run(
            "bash",
            "-c",
            f"{script} && ip addr add 192.0.2.{number}/24 dev lost0{neighbours}",
            on=node,
        )
        assert done.returncode == 0, done.stderr
    began = time.monotonic()
    options = ["--ranks-per-worker", 6, "--collective-timeout", "10s"]
    job = cluster.run(
        *SRUN, *CHECK, *options, variables={"GLOO_SOCKET_IFNAME": "lost0"}, timeout=150
    )
    assert job.returncode == 1, job.stderr
    assert time.monotonic() - began < 60
    assert job.stdout.count("\nwrong  1 process group failed, on n1, n2 and n3: ") == 1
    assert "Set the network of the process group: export GLOO_SOCKET_IFNAME=" in " ".join(
        job.stdout.split()
    )


def test_check_cluster_finds_folder_that_a_host_cannot_write(cluster: SlurmCluster) -> None:
    (cluster.folder / "read").mkdir()
    script = "mount --bind read read && mount -o remount,bind,ro read"
    assert cluster.run("bash", "-c", script, on="n2").returncode == 0
    job = cluster.run(*SRUN, *CHECK, "--run-dir", "read/run")
    assert job.returncode == 1, job.stderr
    assert f"wrong  n2 cannot write in {cluster.folder}/read: Read-only file system" in " ".join(
        job.stdout.split(" ")
    )


def test_check_cluster_names_worker_that_spans_hosts(cluster: SlurmCluster) -> None:
    job = cluster.run("srun", "--mpi=pmi2", "--nodes=3", "--ntasks=6", *CHECK)
    assert (job.returncode, job.stderr) == (0, "")
    words = " ".join(job.stdout.split())
    assert (
        "look 1 worker of 3 spans several hosts To avoid this, start a multiple of 2 ranks on "
        "each host" in words
    )
    assert re.search(r"^ a worker that spans hosts +1 +2 +gloo ", job.stdout, re.MULTILINE)
