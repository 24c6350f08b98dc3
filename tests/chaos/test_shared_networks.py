"""Test the events of docs/explanation/fault-tolerance.md with each parallel strategy."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import optuna
import pytest

from tests.support.chaos import Victim, kill_at_end
from tests.support.launch import ALONE, Mpi
from tests.support.run_output import find_complete_losses, load_trials
from tests.support.sharing import (
    SHARING,
    WAYS,
    make_sharing_arguments,
    measure_seconds_lost,
    read_rank_notes,
)

# By way: the size of the worker, and which rank of it fails when. A failure ends all trainers of
# the worker, so the moments differ between the ways, and all kinds are in one of them. A pipeline's
# middle stage reads no data.
FAILURES = {
    "replicate": (
        3,
        {"raise@forward0": 1, "memory@forward1": 0, "raise@data1": 2, "sleep@gather1": 2},
    ),
    "shard": (
        2,
        {"interrupt@backward1": 1, "raise@gather1": 1, "keep@forward1": 0, "sleep@backward1": 0},
    ),
    "pipeline": (
        3,
        {"raise@backward0": 2, "raise@validation0": 0, "keep@forward1": 2, "sleep@backward1": 1},
    ),
}
PATIENCE = 6  # seconds for which ranks wait for one that sleeps
RAISED = {"memory": "OutOfMemoryError", "interrupt": "KeyboardInterrupt"}  # ValueError otherwise


def assert_nothing_grows(folder: Path, size: int) -> None:
    """Assert that trainers use no more resources at the end than after a quarter."""
    for rank in range(size):
        starts = [note for note in read_rank_notes(folder, rank) if note["event"] == "starts"]
        early, late = starts[len(starts) // 4], starts[-1]
        assert late["networks"] == 0, starts
        assert late["descriptors"] <= early["descriptors"] + 4, starts
        assert late["threads"] <= early["threads"] + 4, starts
        assert late["memory"] <= early["memory"] + 30, starts


def line_of(code: str) -> int:
    lines = SHARING.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the loss after each epoch if one rank trains the network.

    All evaluations train this network.
    """
    folder = tmp_path_factory.mktemp("alone")
    job = Mpi().run(
        1, *make_sharing_arguments("replicate", "--evaluations", 1, *ALONE, epochs=3), cwd=folder
    )
    assert (job.returncode, job.stderr) == (0, "")
    (trial,) = load_trials(folder / "run")
    assert sorted(trial.intermediate_values) == [1, 2, 3]
    return trial.intermediate_values


def assert_undisturbed(
    trial: optuna.trial.FrozenTrial, losses: dict[int, float], slope: float
) -> None:
    """Assert that an evaluation has the losses that it would have alone, also after failures."""
    for epoch, loss in trial.intermediate_values.items():
        assert loss - slope * trial.number == pytest.approx(losses[epoch], rel=1e-4)


@pytest.mark.parametrize("way", FAILURES)
def test_failure_in_a_shared_network_fails_one_evaluation(
    mpi: Mpi, tmp_path: Path, losses: dict[int, float], way: str
) -> None:
    size, chosen = FAILURES[way]
    failures = {f"{what}:{rank}": rank for what, rank in chosen.items()}
    options = [
        "--ranks-per-worker",
        size,
        "--evaluations",
        2 * len(failures),
        "--collective-timeout",
        PATIENCE,
    ]
    job = mpi.run(
        size,
        *make_sharing_arguments(way, *options, fails=",".join(failures), folder=tmp_path),
        cwd=tmp_path,
        timeout=200,
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    for number, (what, rank) in enumerate(failures.items()):
        failure, (kind, place) = (
            trials[2 * number].user_attrs["failure"],
            re.split(r"@|\d", what)[:2],
        )
        if kind == "sleep":
            code_line = r"(shar(ing|ed_training)\.py:\d+|its end)"
            waited = (
                rf"timeout: rank \d waited {PATIENCE} s \(--collective-timeout\) at {code_line}"
            )
            late = rf"rank {rank}, which was at sharing\.py:{line_of('time.sleep(3600)')}"
            # On busy cores, a rank that waits too may begin so late that it is named as well.
            before = rf"(rank \d, which was at {code_line}, )?"
            after = rf"(, rank \d, which was at {code_line})?"
            assert re.fullmatch(f"{waited} for {before}{late}{after}", failure), (what, failure)
        else:
            reason = f"{RAISED.get(kind, 'ValueError')}: injected: {kind} in {place}"
            assert failure == f"rank {rank}, sharing.py:{line_of('raise RAISED')}: {reason}"
            assert "in spring\n" in trials[2 * number].user_attrs["traceback"]
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE"] * len(failures)
    for trial in trials:
        assert_undisturbed(trial, losses, slope=-1)
    assert_nothing_grows(tmp_path, size)
    assert max(measure_seconds_lost(tmp_path, size, len(failures) - 1)) < PATIENCE - 2, (
        "no rank has waited for a timeout"
    )


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_with_shared_networks_leave_nothing_behind(
    mpi: Mpi, tmp_path: Path, losses: dict[int, float], way: str
) -> None:
    options = ["--evaluations", 12, "--pruner", "median"]
    job = mpi.run(
        2,
        *make_sharing_arguments(way, *options, folder=tmp_path, epochs=3, slope=0.1),
        cwd=tmp_path,
        timeout=200,
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert len(trials) - len(find_complete_losses(trials)) == len(pruned)
    assert 3 < len(pruned) < 12
    assert min(len(trial.intermediate_values) for trial in pruned) < 3
    for trial in trials:
        assert_undisturbed(trial, losses, slope=0.1)
    assert_nothing_grows(tmp_path, 2)
    processes = {note["process"] for rank in range(2) for note in read_rank_notes(tmp_path, rank)}
    # A pipeline makes a process group of its own; trainers in which one is left are replaced.
    assert len(processes) == (24 if way == "pipeline" else 2)


def test_ranks_close_the_files_of_crashed_trainers(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 900, "--ranks-per-worker", 2]  # It is stopped before.
    command = make_sharing_arguments(
        "replicate", *options, fails="raise@forward0:1", every=1, epochs=1, folder=tmp_path
    )
    with kill_at_end(Victim(mpi, 2, command, tmp_path, tmp_path / "log")) as victim:
        found: dict[int, list[int]] = {}
        for count in (6, 22):
            assert victim.wait_for(f"\n{count:3}/900 ")
            for process in [*victim.find_ranks(), *victim.find_templates()]:
                found.setdefault(process, []).append(
                    len(list(Path(f"/proc/{process}/fd").iterdir()))
                )
        victim.job.send_signal(signal.SIGUSR1)
        assert victim.wait(60) == (75, "")
    assert find_complete_losses(load_trials(tmp_path / "run")) == {}
    assert len(found) == 3, "two ranks and one template"
    for early, late in found.values():
        # A trainer's pipes are open at some moments, 9 of them; one left by each would be 40.
        assert late < early + 20, found
