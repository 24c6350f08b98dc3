"""Test how `hpo check-cluster` judges facts about hosts, GPUs, network and folders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.check.cluster_report import (
    ClockOffset,
    ClusterFacts,
    FolderFacts,
    FolderView,
    GroupSpeed,
    RankFacts,
    format_ranges,
    judge_cluster,
    print_cluster,
)
from hpo.check.run_cluster_check import FolderTest, find_file_system
from hpo.errors import UsageError
from hpo.evaluation.host import Gpus
from hpo.layout import Layout
from hpo.process.launcher import describe_launcher, describe_scheduler

GPU_IDS = ("a", "b")


def make_rank(host: int, core: int, **changes: Any) -> RankFacts:
    rank = RankFacts(
        host,
        f"n{host}",
        cores=(core,),
        host_cores=2,
        threads_per_core=1,
        container=f"n{host}",
        gpus=Gpus(),
    )
    return replace(rank, **changes)


def make_facts(ranks: Sequence[RankFacts] = (), **changes: Any) -> ClusterFacts:
    """Return facts about 4 ranks on 2 hosts, with which nothing is wrong."""
    given = ranks or [make_rank(host, core) for host in (0, 2) for core in (0, 1)]
    folder = FolderFacts(Path("/shared"), "nfs4", free=10**12, has_locks=True, write_seconds=0.002)
    facts = ClusterFacts(
        Layout(len(given), 2, 1),
        given,
        clocks=[ClockOffset(0.0, 0.0), ClockOffset(0.001, 0.0005)],
        folder=folder,
        views=[
            FolderView(0.0, sees_lock=True, is_seen=True),
            FolderView(0.1, sees_lock=True, is_seen=True),
        ],
        speeds=[GroupSpeed((0, 1), "", 0.1, 1e-4, 4e9), GroupSpeed((2, 3), "", 0.2, 2e-4, 3e9)],
        between_hosts=GroupSpeed((0, 2), "", 0.3, 1e-3, 1e9),
        mpi="MPICH 5.0.2",
        launcher="srun",
        scheduler="SLURM job 7",
        job_end_variable="SLURM_JOB_END_TIME",
    )
    return replace(facts, **changes)


def judge(facts: ClusterFacts) -> list[str]:
    """Return the findings that are not "ok"."""
    return [f"{found.level}: {found.text}" for found in judge_cluster(facts) if found.level != "ok"]


def test_good_cluster_has_only_ok_findings() -> None:
    assert judge(make_facts()) == []
    assert [found.text for found in judge_cluster(make_facts())] == [
        "The ranks of each worker are on one host",
        "Each rank has a core or more",
        "The trainers of all workers have started and communicated",
        "The clocks of the hosts differ by at most 1.5 ms",
        "A durable write to /shared takes 2 ms, and all hosts see the same files",
        "A run stops before its job ends, by SLURM_JOB_END_TIME",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}, {"host": 0, "host_name": "n0"}, {}], "look: 1 worker of 2 spans several hosts"),
        ([{"cores": (0,)}, {"cores": (0,)}, {}, {}], "look: 2 ranks share 1 core on n0"),
        (
            [{"host_cores": 64}, {"host_cores": 64}, {}, {}],
            "look: Each rank on n0 is bound to one core, and other",
        ),
        (
            [
                {"host_cores": 64, "threads_per_core": 2, "cores": (core, core + 32)}
                for core in range(4)
            ],
            "look: Each rank on n0 and n2 is bound to one core, and other",
        ),
        (
            [{}, {"container": "other"}, {}, {}],
            "look: Ranks are in different containers or cgroups, so there are ",
        ),
        ([{"gpus": Gpus(GPU_IDS, (0,))}] * 4, "look: 1 GPU of 2 not used"),
        ([{"gpus": Gpus(GPU_IDS, (0, 1))}] * 4, "look: 2 GPUs of 2 shared by several ranks"),
    ],
)
def test_findings_about_ranks_name_hosts(
    changes: Sequence[Mapping[str, Any]], expected: str
) -> None:
    ranks = [replace(rank, **one) for rank, one in zip(make_facts().ranks, changes, strict=True)]
    found = judge(make_facts(ranks, clocks=[ClockOffset(0.0, 0.0)] * 2))
    assert any(text.startswith(expected) for text in found), found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"speeds": [GroupSpeed((0, 1), "killed"), GroupSpeed((2, 3), "killed")]},
            "wrong: 2 process groups failed, on ",
        ),
        (
            {"between_hosts": GroupSpeed((0, 2), "refused")},
            "wrong: 1 process group failed, on n0 and n2: refused",
        ),
        (
            {
                "speeds": [
                    GroupSpeed((0, 1), "rank 0: no route"),
                    GroupSpeed((2, 3), "rank 1: no route"),
                ]
            },
            "wrong: 2 process groups failed, on n0 and n2: rank 0: no route",
        ),
        (
            {
                "views": [
                    FolderView(0.0, True, True),
                    FolderView(0.1, True, write_error="Read-only file system"),
                ]
            },
            "wrong: n2 cannot write in /shared: Read-only file system",
        ),
        (
            {"clocks": [ClockOffset(0.0, 0.0), ClockOffset(-3.0, 0.01)]},
            "look: Clocks differ from n0: n2 by 3 s",
        ),
        (
            {"scheduler": "PBS job 1", "job_end_variable": ""},
            "look: No environment variable has the end time of this job",
        ),
        (
            {"views": [FolderView(0.0, True, True), FolderView(None, False)]},
            "wrong: n2 does not see the files of n0 in ",
        ),
        (
            {"views": [FolderView(0.0, True, True), FolderView(5.0, True, True)]},
            "look: Changes in /shared are seen late",
        ),
        (
            {"views": [FolderView(0.0, True, True), FolderView(0.1, True)]},
            "look: Changes in /shared are seen late",
        ),
        (
            {"views": [FolderView(0.0, True, True), FolderView(0.1, False, True)]},
            "look: Locks in /shared are not seen on n2",
        ),
    ],
)
def test_findings_about_hosts_name_them(changes: Mapping[str, Any], expected: str) -> None:
    (found,) = judge(make_facts(**changes))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"has_locks": False},
            "look: /shared has no locks: a second run in the same run directory would not be "
            "detected",
        ),
        ({"write_seconds": 0.5}, "look: A durable write to /shared takes 0.5 s"),
    ],
)
def test_findings_about_folder(changes: Mapping[str, Any], expected: str) -> None:
    assert judge(make_facts(folder=replace(make_facts().folder, **changes))) == [expected]


def test_hosts_of_the_same_name_are_not_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [make_rank(host, core, host_name="node") for core in (0, 1) for host in (0, 2)]
    facts = make_facts(
        ranks, speeds=[GroupSpeed((0, 1), "refused"), GroupSpeed((2, 3), "", 0.2, 2e-4, 3e9)]
    )
    print_cluster(facts)
    assert re.search(
        r"^ a worker that spans hosts +1 +2 +gloo ", capsys.readouterr().out, re.MULTILINE
    )
    (wrong,) = [found for found in judge_cluster(facts) if found.level == "wrong"]
    assert "GLOO_SOCKET_IFNAME" in wrong.advice


def test_clocks_before_and_after_the_first_host_differ_by_both() -> None:
    ranks = [make_rank(host, core) for host in (0, 2, 4) for core in (0, 1)]
    clocks = [ClockOffset(0.0, 0.0), ClockOffset(0.02, 0.001), ClockOffset(-0.03, 0.001)]
    facts = make_facts(ranks, speeds=[], clocks=clocks, views=[FolderView(0.1, True, True)] * 3)
    assert "The clocks of the hosts differ by at most 52 ms" in [
        found.text for found in judge_cluster(facts)
    ]


def test_many_different_failures_are_counted() -> None:
    reasons = ["killed", "refused", "no route", "no memory", "no name"]
    ranks = [make_rank(host, core) for host in range(5) for core in (0, 1)]
    speeds = [
        GroupSpeed((2 * worker, 2 * worker + 1), reason) for worker, reason in enumerate(reasons)
    ]
    facts = make_facts(
        ranks,
        speeds=speeds,
        clocks=[ClockOffset(0.0, 0.0)] * 5,
        views=[FolderView(0.1, True, True)] * 5,
    )
    found = judge(facts)
    assert len(found) == 4
    assert found[3] == "wrong: 2 process groups more failed, for other reasons"


def test_slow_worker_is_found_among_three() -> None:
    ranks = [make_rank(host, core) for host in (0, 2, 4) for core in (0, 1)]
    speeds = [GroupSpeed((0, 1), "", 0.1, 1e-4, 4e9), GroupSpeed((2, 3), "", 0.1, 1e-4, 1e9)]
    speeds.append(GroupSpeed((4, 5), "", 0.1, 1e-4, 3e9))
    facts = make_facts(
        ranks,
        speeds=speeds,
        clocks=[ClockOffset(0.0, 0.0)] * 3,
        views=[FolderView(0.1, True, True)] * 3,
    )
    assert judge(facts) == [
        "look: Workers with less than 50% of the median bandwidth of the workers: 1 on n2"
    ]


def test_printed_groups_have_slowest_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_cluster(make_facts())
    printed = capsys.readouterr().out
    assert printed.startswith(
        "MPICH 5.0.2; ranks started by srun in SLURM job 7\n/shared: nfs4, 1000 GB free\n"
    )
    assert re.search(r"^ n2 +2-3 +1 +2 of 2 +1 +1 +\+1\.0 ± 0\.5$", printed, re.MULTILINE)
    assert re.search(r"^ a worker on one host +2 +2 +gloo +0\.2 +0\.2 +3$", printed, re.MULTILINE)
    assert re.search(r"^ one rank of each host +1 +2 +gloo +0\.3 +1 +1$", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1, 2, 8], "0-2, 8"), ([5, 4, 4, 0], "0, 4-5"), ([1, 3, 5], "1, 3, 5")],
)
def test_format_ranges(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


def test_find_file_system_uses_innermost_mount() -> None:
    assert find_file_system(Path("/proc/self")) == "proc"
    assert find_file_system(Path("/proc/sys")) != ""


def test_folder_test_leaves_nothing(tmp_path: Path) -> None:
    test = FolderTest(tmp_path / "new" / "run")
    assert test.facts.path == tmp_path
    assert test.facts.has_locks
    assert 0 < test.facts.write_seconds < 10
    assert test.folder.parent == tmp_path
    test.close()
    assert not list(tmp_path.iterdir())


def test_folder_test_follows_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    test = FolderTest(tmp_path / "link" / "run")
    test.close()
    assert test.facts.file_system == find_file_system(Path("/dev/shm")) == "tmpfs"


def test_folder_test_in_unusable_folder_fails() -> None:
    with pytest.raises(UsageError, match=r"^--run-dir /proc/run: /proc cannot be used: "):
        FolderTest(Path("/proc/run"))


@pytest.mark.parametrize(
    ("variables", "launcher", "scheduler"),
    [
        ({}, "no launcher", ""),
        ({"PMI_RANK": "0", "HYDI_CONTROL_FD": "7"}, "mpirun", ""),
        (
            {"PMI_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"},
            "srun",
            "SLURM job 9",
        ),
        (
            {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PBS_JOBID": "9.host"},
            "mpirun",
            "PBS job 9.host",
        ),
        ({"PMIX_RANK": "0"}, "a launcher with PMI", ""),
    ],
)
def test_launcher_and_scheduler_are_named(
    variables: dict[str, str], launcher: str, scheduler: str
) -> None:
    assert (describe_launcher(variables), describe_scheduler(variables)) == (launcher, scheduler)
