"""What docs/reliability.md promises, where ranks share a network by `hpo.training.fit`, in each of the ways."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import optuna
import pytest

from tests.support.chaos import Victim, ended
from tests.support.launch import ALONE, Mpi
from tests.support.outcome import finished, trials_of
from tests.support.sharing import FAILURES, SHARING, WAYS, notes_of, seconds_lost, sharing

HANGS = [{"sleep@backward1": (0, 1)}, {"sleep@gather1": (1, 2)}]
PATIENCE = 8  # seconds for which ranks wait for one that sleeps
RAISED = {"memory": "OutOfMemoryError", "interrupt": "KeyboardInterrupt"}  # ValueError otherwise


def assert_nothing_grows(folder: Path, size: int) -> None:
    """Assert that a trainer has no more at the start of its last evaluation than in the first quarter."""
    for rank in range(size):
        starts = [note for note in notes_of(folder, rank) if note["event"] == "starts"]
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
    """Return the losses after each epoch of the network that all evaluations train, as one rank trains it."""
    folder = tmp_path_factory.mktemp("alone")
    job = Mpi().run(1, *sharing("replicate", "--evaluations", 1, *ALONE, epochs=3), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    (trial,) = trials_of(folder / "run")
    assert sorted(trial.intermediate_values) == [1, 2, 3]
    return trial.intermediate_values


def assert_undisturbed(trial: optuna.trial.FrozenTrial, losses: dict[int, float], slope: float) -> None:
    """Assert that an evaluation has the losses that it would have alone, whatever became of those before it."""
    for epoch, loss in trial.intermediate_values.items():
        assert loss - slope * trial.number == pytest.approx(losses[epoch], rel=1e-4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_fails_while_a_network_is_shared_costs_one_evaluation(
    mpi: Mpi, tmp_path: Path, losses: dict[int, float], way: str, size: int
) -> None:
    failures = {f"{what}:{ranks[size - 2]}": ranks[size - 2] for what, ranks in (FAILURES | HANGS[size - 2]).items()}
    options = ["--ranks-per-worker", size, "--evaluations", 2 * len(failures), "--collective-timeout", PATIENCE]
    job = mpi.run(size, *sharing(way, *options, fails=",".join(failures), folder=tmp_path), cwd=tmp_path, timeout=200)
    assert (job.returncode, job.stderr) == (0, "")
    trials = trials_of(tmp_path / "run")
    for number, (what, rank) in enumerate(failures.items()):
        failure, (kind, place) = trials[2 * number].user_attrs["failure"], re.split(r"@|\d", what)[:2]
        if kind == "sleep":
            waited = rf"timeout: rank \d waited {PATIENCE} s \(--collective-timeout\) at sharing\.py:\d+"
            late = rf"rank {rank}, which was at sharing\.py:{line_of('time.sleep(3600)')}"
            assert re.fullmatch(f"{waited} for {late}", failure), (what, failure)
        else:
            reason = f"{RAISED.get(kind, 'ValueError')}: injected: {kind} in {place}"
            assert failure == f"rank {rank}, sharing.py:{line_of('raise RAISED')}: {reason}"
            assert "in spring\n" in trials[2 * number].user_attrs["traceback"]
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE"] * len(failures)
    for trial in trials:
        assert_undisturbed(trial, losses, slope=-1)
    assert_nothing_grows(tmp_path, size)
    assert max(seconds_lost(tmp_path, size, len(FAILURES))) < PATIENCE - 2, "nobody has waited for a timeout"


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_that_share_networks_leave_nothing_behind_pruned_or_not(
    mpi: Mpi, tmp_path: Path, losses: dict[int, float], way: str
) -> None:
    options = ["--evaluations", 16, "--pruner", "median"]
    job = mpi.run(2, *sharing(way, *options, folder=tmp_path, epochs=3, slope=0.1), cwd=tmp_path, timeout=200)
    assert (job.returncode, job.stderr) == (0, "")
    trials = trials_of(tmp_path / "run")
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert len(trials) - len(finished(trials)) == len(pruned)
    assert 4 < len(pruned) < 16
    assert min(len(trial.intermediate_values) for trial in pruned) < 3
    for trial in trials:
        assert_undisturbed(trial, losses, slope=0.1)
    assert_nothing_grows(tmp_path, 2)
    processes = {note["process"] for rank in range(2) for note in notes_of(tmp_path, rank)}
    # A pipeline makes a process group of its own; trainers in which one is left are replaced.
    assert len(processes) == (32 if way == "pipeline" else 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_whose_ranks_share_a_network_stops_well_and_goes_on(
    mpi: Mpi, tmp_path: Path, losses: dict[int, float], way: str
) -> None:
    command = sharing(way, "--resume", "--evaluations", 2)
    victim = Victim(mpi, 2, [*command, "--set", "epochs=3", "--set", "seconds=0.1"], tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while not any(trial.intermediate_values for trial in trials_of(tmp_path / "run")):
        assert victim.job.poll() is None
        victim.sleep(0.05)
    asked = time.monotonic()
    victim.job.send_signal(signal.SIGUSR1)
    status, errors = victim.wait(30)
    assert (status, errors) == (75, "")
    assert time.monotonic() - asked < 10
    again = mpi.run(2, *command, "--set", "slope=0", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    stopped, *others = trials_of(tmp_path / "run")
    assert stopped.user_attrs["failure"] == "interrupted"
    assert len(finished(others)) == 2
    for trial in others:
        assert_undisturbed(trial, losses, slope=0)


def test_ranks_whose_trainers_crash_keep_no_files_of_them(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 40, "--ranks-per-worker", 2]
    command = sharing("replicate", *options, fails="raise@forward0:1", epochs=1, folder=tmp_path)
    with ended(Victim(mpi, 2, command, tmp_path, tmp_path / "log")) as victim:
        found: dict[int, list[int]] = {}
        for count in (10, 36):
            assert victim.wait_for(f"\n{count}/40 ")
            for process in [*victim.rank_processes(), *victim.templates()]:
                found.setdefault(process, []).append(len(list(Path(f"/proc/{process}/fd").iterdir())))
        assert victim.wait(60) == (0, "")
    assert len(found) == 3, "two ranks and one template"
    for early, late in found.values():
        assert late <= early + 8, found  # pipes of one trainer, a copy of another rank's, a file that is being read
