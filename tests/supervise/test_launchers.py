"""Test how command lines of launchers are read, and changed for fewer hosts."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from hpo.supervise.launchers import find_launcher, find_option, find_program, set_option
from hpo.supervise.slurm import expand_counts, is_batch_host_lost
from hpo.supervise.supervisor import StartPlan, can_find_live_hosts, find_live_hosts, plan_start
from tests.support.limits import scale

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),1"}
PROGRAM = "hpo search s.py --run-dir r"


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs named like SLURM's and ssh on PATH. The job has lost n3, and n2 is lost."""
    programs = {
        "scontrol": 'case $3 in "n[1-3]") echo n1 n2 n3 ;; *) echo n1 n2 ;; esac',
        "squeue": "echo 'n[1-2]'",
        "srun": 'case "$*" in *=n2*) sleep 60 ;; *SLURM_GPUS*) exit 1 ;; esac',
        "ssh": 'case "$*" in *" n2 "*) exit 255 ;; esac',
    }
    for name, code in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "capacities"),
    [
        ("mpirun -hosts a,b -n 8", {"a": 4, "b": 4}),
        ("mpirun -hosts a,b -ppn 2 -n 4", {"a": 2, "b": 2}),
        ("mpiexec.hydra -n 5 -hosts a:3,b:2", {"a": 3, "b": 2}),
        ("mpirun --allow-run-as-root --host a:2,b:6 -np 8", {"a": 2, "b": 6}),
        ("mpirun --oversubscribe -H a:2,b:6 -np 8", {"a": 2, "b": 6}),
        ("mpirun -f hosts -n 6", {"a": 3, "b": 3}),
        ("mpirun --hostfile slots -n 6", {"a": 4, "b": 2}),
        ("mpirun -machinefile pbs -n 3", {"a": 2, "b": 1}),
    ],
)
def test_mpirun_capacities_come_from_its_hosts(
    words: str, capacities: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("# the hosts\na\n\nb\n")
    Path("slots").write_text("a slots=4\nb slots=2 max_slots=8\n")
    Path("pbs").write_text("a\na\nb\n")
    launcher = find_launcher([*words.split(), *PROGRAM.split()], {})
    assert launcher
    assert dict(launcher.capacities) == capacities


@pytest.mark.parametrize(
    "words",
    [
        *("mpirun -n 8", "mpirun -hosts a -n 8", "srun -n 8", "bash -c", "mpirun -f gone -n 2"),
        "mpirun --host a,b --map-by ppr:4:node",  # It is not known how many ranks it starts.
    ],
)
def test_launcher_without_several_known_hosts_is_none(words: str) -> None:
    assert find_launcher([*words.split(), *PROGRAM.split()], {}) is None


@pytest.mark.parametrize(
    ("words", "capacities"),
    [
        ("srun --mpi=pmi2", {"n1": 4, "n2": 4, "n3": 1}),
        ("srun --ntasks-per-node=2 --kill-on-bad-exit=1", {"n1": 2, "n2": 2, "n3": 2}),
        ("srun -n8", {"n1": 3, "n2": 3, "n3": 2}),
        ("srun --ntasks 4", {"n1": 2, "n2": 1, "n3": 1}),
    ],
)
@pytest.mark.usefixtures("scripts")
def test_srun_capacities_come_from_its_job(words: str, capacities: dict[str, int]) -> None:
    launcher = find_launcher([*words.split(), *PROGRAM.split()], JOB)
    assert launcher
    assert dict(launcher.capacities) == capacities
    assert launcher.list_hosts() == ["n1", "n2"], "SLURM has removed n3"


@pytest.mark.mpi  # It asks mpirun for its version.
@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("mpirun -hosts a,b -ppn 2 -n 4", "mpirun -hosts a:2 -n 2"),
        ("mpirun -l -f hosts -genv A 1 -n 8", "mpirun -hosts a:4 -n 2 -l -genv A 1"),
        (
            "prun/mpirun --machinefile hosts --mca btl tcp -np 8",
            "prun/mpirun --host a:4 -n 2 --mca btl tcp",
        ),
    ],
)
def test_mpirun_is_restricted_to_hosts(
    words: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prun").mkdir()
    Path("prun/mpirun").write_text("#!/bin/bash\necho 'mpirun (Open MPI) 5.0.8'\n")
    Path("prun/mpirun").chmod(0o755)
    Path("hosts").write_text("a\nb\n")
    program = [
        "python",
        "-u",
        "run_islands.py",
        "-n",
        "5",
        "--run-dir",
        "r",
        "--",
        "train.py",
        "-n",
        "3",
    ]
    launcher = find_launcher([*words.split(), *program], {})
    assert launcher
    assert launcher.restrict(["a"], 2) == [*changed.split(), *program]


@pytest.mark.usefixtures("scripts")
def test_srun_is_restricted_to_nodes() -> None:
    program = ["hpo", "search", "-n", "3"]
    words = ["srun", "--label", "-n", "8", "--mpi", "pmi2", *program]
    launcher = find_launcher(words, JOB)
    assert launcher
    nodes = ["--nodes=2", "--nodelist=n1,n3", "--ntasks=4", "--ntasks-per-node=3"]
    assert launcher.restrict(["n1", "n3"], 4) == [
        "srun",
        "--overlap",
        *nodes,
        "--label",
        "--mpi",
        "pmi2",
        *program,
    ]
    assert launcher.restrict(["n1", "n2", "n3"], 8) == ["srun", "--overlap", *words[1:]]
    assert find_launcher(["srun", "-N2", *words[1:]], JOB) is None, "the user has chosen nodes"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("srun -n 4 --mpi=pmi2 hpo search", "hpo"),
        ("srun --overlap hpo search", "hpo"),
        ("srun -N2 apptainer run", "apptainer"),
        ("mpirun -prepend-rank -n 2 python x.py", "python"),
        ("mpirun --map-by core python x.py", "python"),
    ],
)
def test_program_is_found_after_options_of_launcher(words: str, program: str) -> None:
    assert words.split()[find_program(words.split())] == program


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_lost_node_is_found_although_its_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on a lost node does not end. Options of the job script do not reach small steps."""
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "4")
    monkeypatch.setattr("hpo.supervise.supervisor._SECONDS_TO_ANSWER", 2.0)
    launcher = find_launcher(f"srun {PROGRAM} --islands 3".split(), JOB)
    assert launcher
    start = time.monotonic()
    plan = plan_start(launcher, 2, lambda: False)
    assert time.monotonic() - start < scale(20)
    assert (plan.workers, plan.ranks, plan.missing) == (2, "4 ranks on n1", ("n2", "n3"))
    assert find_option(plan.words, "--ranks-per-worker") == "2"
    assert find_option(plan.words, "--islands") == "2"
    assert plan.describe(plan) == "restarting it with 4 ranks on n1", "a host is lost only once"
    assert (
        plan.describe(StartPlan([], 4)) == "n2, n3 do not answer; restarting it with 4 ranks on n1"
    )
    few = plan_start(launcher, 8, lambda: False)
    assert (few.workers, few.describe(plan)) == (
        0,
        "too few ranks are left for a worker; waiting for hosts",
    )
    assert can_find_live_hosts(launcher, lambda: False)


@pytest.mark.mpi  # It asks mpirun for its version.
@pytest.mark.usefixtures("scripts")
def test_hosts_of_mpirun_are_reached_by_ssh() -> None:
    launcher = find_launcher(f"mpirun -hosts n1,n2,n3 -n 6 {PROGRAM}".split(), {})
    assert launcher
    assert find_live_hosts(launcher) == ["n1", "n3"]
    plan = plan_start(launcher, 2, lambda: False)
    back = StartPlan(launcher.words, 3, "6 ranks on n1, n2, n3")
    assert back.describe(plan) == "restarting it with 6 ranks on n1, n2, n3"
    assert back.describe(back) == "restarting it"


def test_options_are_set_before_users_program() -> None:
    words = [
        "mpirun",
        "hpo",
        "search",
        "--run-dir",
        "r",
        "--islands=3",
        "--",
        "train.py",
        "--islands",
        "9",
        "--resume",
    ]
    assert find_option(words, "--islands") == "3"
    changed = set_option(set_option(words, "--islands", 2), "--resume")
    assert find_option(changed, "--islands") == "2"
    assert changed == [*words[:6], "--islands", "2", "--resume", *words[6:]]
    assert set_option(changed, "--resume") == changed
    assert find_option(["srun", "-N2", "--", "hpo", "search", "--run-dir", "r"], "--run-dir") == "r"


@pytest.mark.mpi  # It asks mpirun for its version.
def test_ranks_are_at_most_those_of_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("n1:16\nn2:16\nn3:16\n")
    launcher = find_launcher(f"mpirun -f hosts -n 8 {PROGRAM}".split(), {})
    assert launcher
    assert launcher.ranks == 8
    assert plan_start(launcher, 2, lambda: False).ranks == "8 ranks on n1, n3"
    (scripts / "ssh").write_text("#!/bin/bash\nexit 255\n")
    assert not can_find_live_hosts(launcher, lambda: False), "ssh does not work here"


def test_expand_counts_repeats_numbers() -> None:
    assert expand_counts("4(x2),1") == [4, 4, 1]
    assert expand_counts("") == []


@pytest.mark.parametrize(
    ("printed", "lost"),
    [
        ("RUNNING|n[1-2]|n1", False),
        ("RUNNING|n[1-2]|n3", True),
        ("COMPLETING|n[1-2]|n3", False),
        ("RUNNING||n3", False),
        ("", False),
    ],
)
def test_batch_host_is_lost_if_not_among_nodes(scripts: Path, printed: str, lost: bool) -> None:
    (scripts / "squeue").write_text(f"#!/bin/bash\necho '{printed}'\n")
    assert is_batch_host_lost("7") is lost
