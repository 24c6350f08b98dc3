"""Test communicators and waiting ranks in MPI jobs, and training on workers of several sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import Victim, kill_at_end
from tests.support.launch import PROGRAM, PROGRAMS, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import load_trials


def run_program(mpi: Mpi, ranks: int, program: str, folder: Path) -> list[dict[str, Any]]:
    return parse_rank_lines(mpi.run(ranks, "-m", "mpi4py", PROGRAMS / program, cwd=folder), ranks)


def parse_rank_lines(job: subprocess.CompletedProcess[str], ranks: int) -> list[dict[str, Any]]:
    """Return the content of the JSON line that each rank has printed, in the order of ranks."""
    assert (job.returncode, job.stderr) == (0, "")
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    assert sorted(line["rank"] for line in lines) == list(range(ranks))
    return sorted(lines, key=lambda line: int(line["rank"]))


@pytest.mark.parametrize("ranks", [1, 8])
def test_communicator_delivers_and_sleeps_while_it_waits(
    each_mpi: Mpi, ranks: int, tmp_path: Path
) -> None:
    lines = run_program(each_mpi, ranks, "communication.py", tmp_path)
    for line in lines[1:]:
        assert max(line["cpu"].values()) < 0.05, line["cpu"]


@pytest.mark.slow
def test_worker_of_any_size_trains_like_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "training.py")]
    lines = parse_rank_lines(
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scale(200)), 6
    )
    assert [line["size"] for line in lines] == [1, 2, 2, 3, 3, 3]
    for line in lines:
        peers = [peer for peer in lines if peer["size"] == line["size"]]
        total = float(sum(peer["rank"] for peer in peers))
        assert line["group"] == [line["size"], peers.index(line), "gloo", total]
        assert line["losses"] == line["again"], (
            "the same hyperparameters and seed give the same loss"
        )
        assert line["losses"] == peers[0]["losses"], "the same loss on every rank"
        assert line["losses"] == pytest.approx(line["by_the_book"], abs=1e-5)
        assert line["losses"][-1] == pytest.approx(line["own_loss"], abs=1e-6)
        assert line["accuracy"] == pytest.approx(line["own_accuracy"], abs=1e-6)
        assert line["epochs_without_progress"] == 1 + 4
    losses = lines[0]["losses"]
    assert losses[-1] < losses[0] - 0.1, "the loss decreases"


def test_signal_replaces_stop_by_target(each_mpi: Mpi, tmp_path: Path) -> None:
    for line in run_program(each_mpi, 3, "overruling.py", tmp_path):
        assert line["seen"] == [
            "the target is reached",
            None,
            None,
            "another target",
            "SIGINT",
            "SIGINT",
        ]


@pytest.mark.parametrize(
    ("cores_of_ranks", "threads"),
    [
        ([[0, 1]] * 8, [1] * 8),
        ([[0, 1, 2, 3]] * 2, [2, 2]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]),  # bound to separate cores
        ([[0, 1, 2], [2, 3]], [2, 1]),
        ([[0, 1, 2]] * 3, [1, 1, 1]),
        ([[5]], [1]),
    ],
)
def test_thread_share_divides_cores_among_ranks(
    cores_of_ranks: list[list[int]], threads: list[int]
) -> None:
    from hpo.evaluation.host import compute_thread_share

    assert [
        compute_thread_share(cores_of_ranks, rank) for rank in range(len(cores_of_ranks))
    ] == threads


def read_cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_all_processes_sleep_while_one_trainer_works(mpi: Mpi, tmp_path: Path) -> None:
    """One leader waits for its trainer, and its peer waits for the leader.

    The other worker waits for the end of the run.
    """
    arguments = [
        PROGRAM,
        SEARCHES / "waiting.py",
        "--run-dir",
        "run",
        "--islands",
        1,
        "--evaluations",
        4,
    ]
    with kill_at_end(Victim(mpi, 4, arguments, tmp_path, tmp_path / "log")) as victim:
        assert victim.wait_for("\n3/4 ")
        victim.sleep(1.0)
        processes = [*victim.find_ranks(), *victim.find_templates()]
        assert len(processes) == 5
        before = {process: read_cpu_seconds(process) for process in victim.find_processes()}
        assert len(before) >= 1 + 4 + 1 + 4, "mpirun, ranks, the template and trainers"
        victim.sleep(3.0)
        used = {process: read_cpu_seconds(process) - seconds for process, seconds in before.items()}
        (tmp_path / "go").touch()
        assert victim.wait() == (0, "")
    assert max(used.values()) < 0.05 * 3.0, used
    assert Counter(trial.user_attrs["worker"] for trial in load_trials(tmp_path / "run")) == {
        0: 1,
        1: 3,
    }
