"""Test a worker on two hosts.

The hosts are network namespaces of this machine, with their own names and addresses.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import HPO, ROOT, Mpi, write_changed_program
from tests.support.limits import scale
from tests.support.run_output import load_trials

pytestmark = pytest.mark.mpi

# TEST-NET-2 of RFC 5737, which is reserved for documentation.
NETWORK = "198.51.100."
BRIDGE, HOSTS = "hpo-bridge", ("hpo-a", "hpo-b")

# mpirun calls it like ssh: options, the host, the command.
LAUNCHER = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec ip netns exec $host unshare --uts bash -c "hostname $host; exec $*"
"""


def run_ip(arguments: str, check: bool = True) -> str:
    command = ["ip", *arguments.split()]
    return subprocess.run(
        command, check=check, capture_output=True, text=True, timeout=scale(20)
    ).stdout


def delete_network() -> None:
    for number, host in enumerate(HOSTS):
        run_ip(f"link del {BRIDGE}{number}", check=False)
        run_ip(f"netns del {host}", check=False)
        shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)
    run_ip(f"link del {BRIDGE}", check=False)


def make_network() -> None:
    names = "".join(f"{NETWORK}{number} {host}\n" for number, host in enumerate(HOSTS, start=2))
    run_ip(f"link add {BRIDGE} type bridge")
    run_ip(f"addr add {NETWORK}1/24 dev {BRIDGE}")
    run_ip(f"link set {BRIDGE} up")
    for number, host in enumerate(HOSTS):
        run_ip(f"netns add {host}")
        run_ip(f"link add {BRIDGE}{number} type veth peer name eth0 netns {host}")
        run_ip(f"link set {BRIDGE}{number} master {BRIDGE} up")
        run_ip(f"-n {host} addr add {NETWORK}{number + 2}/24 dev eth0")
        run_ip(f"-n {host} link set eth0 up")
        run_ip(f"-n {host} link set lo up")
        # `ip netns exec` mounts this file as /etc/hosts.
        Path("/etc/netns", host).mkdir(parents=True)
        Path("/etc/netns", host, "hosts").write_text(f"127.0.0.1 localhost\n{names}")


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Mpi]:
    """Yield an mpirun that starts half of its ranks on each of two hosts.

    A network bridge connects the hosts.
    """
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=scale(20)
    ).stdout
    if (
        os.geteuid()
        or not all(map(shutil.which, ("ip", "unshare", "hostname")))
        or "HYDRA" not in version
    ):
        pytest.skip("two hosts need root, iproute2, util-linux, hostname and MPICH's mpirun")
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    # Tests that run at the same time use the network one after another. Each of them has a time
    # limit. The lock is in /run, because the network belongs to the whole machine, whatever TMPDIR
    # is.
    with Path("/run/hpo-two-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        delete_network()  # A test that was killed has left it.
        if NETWORK in run_ip("addr"):
            pytest.skip(f"{NETWORK}0 is in use here")
        try:
            make_network()
            flags = (
                f"-launcher ssh -launcher-exec {launcher} -iface {BRIDGE} -hosts {','.join(HOSTS)} "
                "-ppn 2"
            )
            yield Mpi(flags=tuple(flags.split()), forks_templates=False)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        finally:
            delete_network()


def test_worker_spans_two_hosts(two_hosts: Mpi, tmp_path: Path) -> None:
    options = [
        "--ranks-per-worker",
        4,
        "--islands",
        1,
        "--evaluations",
        2,
        "--set",
        "epochs=2",
        "--run-dir",
        "run",
    ]
    job = two_hosts.launch(4, ROOT / "run_islands.py", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "4 ranks, 1 worker of 4, 1 island, 2 hosts" in job.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluations"]["complete"] == 2
    assert 0 < summary["best"]["loss"] < 3
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["hosts"]) == 2


def test_objective_for_torchrun_runs_on_two_hosts(two_hosts: Mpi, tmp_path: Path) -> None:
    """Each host has its own template.

    All trainers connect to one store, on the host of the leader.
    """
    search = ROOT / "tests" / "searches" / "torchrun.py"
    options = [
        "--ranks-per-worker",
        4,
        "--islands",
        1,
        "--evaluations",
        2,
        "--set",
        f"folder={tmp_path}",
    ]
    job = two_hosts.launch(
        4, ROOT / "run_islands.py", search, *options, "--run-dir", "run", cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (0, "")
    found = sorted(tmp_path.glob("*-?.json"))
    assert len(found) == 8
    for path in found:
        rank, environment = (
            int(path.stem.partition("-")[2]),
            json.loads(path.read_text())["environment"],
        )
        expected = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        expected |= {"GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 2}
        assert {name: int(environment[name]) for name in expected} == expected
        assert (environment["MASTER_ADDR"], environment["GLOO_SOCKET_IFNAME"]) == (
            f"{NETWORK}2",
            "eth0",
        )


def test_accelerate_finds_its_ranks_on_two_hosts(two_hosts: Mpi, tmp_path: Path) -> None:
    search = [*HPO, "search", "--space", "lr=Float(1e-3, 1e-1, log=True)"]
    options = [
        "--loss",
        r"val_loss=(\S+)",
        "--ranks-per-worker",
        4,
        "--evaluations",
        1,
        "--run-dir",
        "run",
    ]
    script = ROOT / "tests" / "scripts" / "accelerated.py"
    job = two_hosts.launch(
        4, *search, *options, "--", script, "--mixed_precision", "bf16", cwd=tmp_path
    )
    assert job.returncode == 0, job.stderr
    printed = (tmp_path / "run" / "logs" / "0.txt").read_text()
    assert sorted(
        re.findall(r"process (.*), bf16 computes torch.bfloat16, 4 batches", printed)
    ) == [
        "0 of 4, local 0, main True, local main True",
        "1 of 4, local 1, main False, local main False",
        "2 of 4, local 0, main False, local main True",
        "3 of 4, local 1, main False, local main False",
    ]
    ranks = re.findall(r"rank (\d) .*val_loss=", printed)
    assert sorted(ranks) == ["0"] * 3 + ["2"] * 3, "Accelerate prints once per host"
    (trial,) = load_trials(tmp_path / "run")
    assert len(trial.intermediate_values) == 3


def test_rank_error_ends_job_on_all_hosts(two_hosts: Mpi, tmp_path: Path) -> None:
    program = write_changed_program(
        tmp_path,
        "import time\nfrom mpi4py import MPI\n"
        "from hpo.errors import RunError\nfrom hpo.evaluation.rank_group import RankGroup\n\n\n"
        "def connect(group, *_):\n"
        "    time.sleep(0 if MPI.COMM_WORLD.rank == 3 else 600)\n"
        "    raise RunError('injected')\n\n\n"
        "RankGroup.connect = connect\n",
    )
    search = ROOT / "tests" / "searches" / "quick.py"
    job = two_hosts.launch(
        4, program, search, "--ranks-per-worker", 4, "--run-dir", "run", cwd=tmp_path, timeout=60
    )
    assert job.returncode != 0
    assert job.stderr.count("error: injected") == 1
