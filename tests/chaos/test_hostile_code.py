"""Test objectives, storages and systems that cause harm by accident, in MPI jobs."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.supervise.supervisor import Supervisor
from tests.support.chaos import Victim
from tests.support.endurance import ENDLESS
from tests.support.launch import (
    PROGRAM,
    ROOT,
    SEARCHES,
    Mpi,
    make_hpo_command,
    write_changed_program,
)
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import QUICK

KILLING = SEARCHES / "killing.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_process_group_failure_fails_one_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    options = [
        "--ranks-per-worker",
        4,
        "--islands",
        1,
        "--evaluations",
        13,
        "--collective-timeout",
        3,
    ]
    job = mpi.run(4, PROGRAM, SEARCHES / "grouping.py", "--run-dir", "run", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [trial.state.name for trial in trials] == [*["COMPLETE", "FAIL"] * 6, "COMPLETE"]
    waited = r"timeout: rank \d waited 3 s \(--collective-timeout\) at grouping.py:\d+ for rank "
    reasons = [
        *(
            rf"rank 3, grouping.py:\d+: ValueError: injected: {way}"
            for way in ("making", "group", "mesh")
        ),
        *[waited] * 3,
    ]
    for reason, trial in zip(reasons, trials[1::2], strict=True):
        assert re.match(reason, trial.user_attrs["failure"]), trial.user_attrs["failure"]
    found = re.findall(r"worker 0 rank 0 \| \d+ \S.*: process (\d+)$", job.stdout, re.MULTILINE)
    assert len(set(found)) == len(found) == 13, (
        "process groups that an objective has left end with its process"
    )


def test_objective_that_changes_process_gets_new_trainer(mpi: Mpi, tmp_path: Path) -> None:
    """Every second evaluation makes changes that cannot be undone.

    So the next evaluation needs a new process.
    """
    options = ["--run-dir", "run", "--islands", 1, "--evaluations", 6]
    job = mpi.run(2, PROGRAM, SEARCHES / "messy.py", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert {trial.user_attrs.get("failure") for trial in load_trials(tmp_path / "run")} == {None}
    assert len(load_trials(tmp_path / "run")) == 6
    for rank in (0, 1):
        notes = [json.loads(line) for line in (tmp_path / f"0-{rank}").read_text().splitlines()]
        processes = [note["process"] for note in notes]
        assert processes[::2] == processes[1::2], "an unchanged process is used again"
        assert len(set(processes)) == 3
        assert not any(Path(f"/proc/{process}").exists() for process in processes)


def run_supervise(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        make_hpo_command("supervise", "--max-restarts", 3, *command),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=scale(100),
        check=False,
    )


def test_supervise_gives_up_individual_that_crashes_job(mpi: Mpi, tmp_path: Path) -> None:
    """The individual kills a rank, as the Linux kernel does if memory runs out."""
    options = ["--run-dir", "run", "--ranks-per-worker", 1, "--islands", 1, "--evaluations", 8]
    settings = ["--set", "kills=5", "--set", "seconds=0.02"]
    mpi = replace(mpi, forks_templates=False)  # The individual kills the parent of its template.
    command = mpi.make_command(3, PROGRAM, KILLING, *options, *settings)
    job = run_supervise(command, tmp_path)
    assert job.returncode == 0, job.stderr
    assert "7 complete, 1 failed, of 8" in job.stdout
    assert re.search(
        r"resumed after .*; \d that may have crashed the job twice will run alone at the end",
        job.stdout,
    )
    failures = {
        trial.params["k"]: trial.user_attrs.get("failure")
        for trial in load_trials(tmp_path / "run")
    }
    assert (
        failures[5]
        == "the job crashed 3 times during this evaluation, the last time with no other running"
    )
    assert [k for k, failure in failures.items() if failure] == [5]
    crashes = re.findall(
        r"hpo supervise: the job ended with status 9, after \d+ evaluations?, in trials? ([\d, "
        r"]+); ",
        job.stdout,
    )
    assert len(crashes) == 3
    assert ", " not in crashes[-1], "it was evaluated alone"


def test_forked_child_of_objective_does_not_act_as_rank(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--run-dir", "run", "--islands", 1, "--evaluations", 2]
    job = mpi.run(2, PROGRAM, SEARCHES / "branching.py", *options, cwd=tmp_path, timeout=40)
    assert job.returncode == 0, job.stderr
    assert "2 complete, of 2" in job.stdout
    assert all(trial.values[0] >= 0 for trial in load_trials(tmp_path / "run"))
    assert job.stderr.count("| ValueError: injected: in a child") == 4
    assert "hpo/" not in job.stderr, "their tracebacks have no frames of this program"


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 75])
def test_supervise_restarts_job_with_status_of_launcher(tmp_path: Path, status: int) -> None:
    """Some launchers return 0 although ranks were killed.

    The crash is noticed by the name that the run left in its lock.
    """
    job = f"""
case "$*" in
  *--resume*) : > run/lock ;;
  *) mkdir run && echo "process $$ on $HOSTNAME since 2026-11-25 12:00:00" > run/lock ;;
esac
exit {status}
"""
    line = make_hpo_command("supervise", "--max-restarts", 1, "bash", "-c", job, "--run-dir", "run")
    ended = subprocess.run(
        line, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=scale(60)
    )
    assert (ended.returncode, ended.stderr) == (status, "")
    without = "(1 of 1 without progress)"
    again = (
        f"hpo supervise: the job ended with status {status}, after 0 evaluations; restarting it "
        f"{without}\n"
    )
    assert ended.stdout == again


def write_changed_conclusion(folder: Path, body: str) -> Path:
    """Write a variant of run_islands.py in which `FirstRank.report_outcome` has another body.

    Only the first rank calls it.
    """
    return write_changed_program(
        folder,
        "import hpo.run.first_rank\nfrom pathlib import Path\nfrom hpo.errors import "
        "UsageError\n\nreport = hpo.run.first_rank.FirstRank.report_outcome\n\n\ndef "
        f"changed(stages):\n{body}\n\nhpo.run.first_rank.FirstRank.report_outcome = changed\n",
    )


def test_run_with_damaged_run_json_prints_its_summary(mpi: Mpi, tmp_path: Path) -> None:
    program = write_changed_conclusion(
        tmp_path, "    Path('run/run.json').write_text('{')\n    return report(stages)\n"
    )
    job = mpi.run(
        2,
        program,
        QUICK,
        "--run-dir",
        "run",
        "--islands",
        1,
        "--evaluations",
        2,
        cwd=tmp_path,
        timeout=40,
    )
    assert job.returncode == 0
    assert "2 complete, of 2" in job.stdout
    assert re.fullmatch(
        r"warning: no report was written: run/run.json cannot be read: .*\n", job.stderr
    )


def test_usage_error_on_one_rank_ends_job(each_mpi: Mpi, tmp_path: Path) -> None:
    program = write_changed_conclusion(tmp_path, "    raise UsageError('injected')\n")
    options = ["--run-dir", "run", "--islands", 1, "--evaluations", 2]
    job = each_mpi.run(2, program, QUICK, *options, cwd=tmp_path, timeout=40)
    assert job.returncode == 1
    assert job.stderr.count("error: injected") == 1
    assert "Traceback" not in job.stderr


def test_suspended_job_loses_nothing(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--run-dir", "run", "--islands", 1, "--evaluations", 3, "--collective-timeout", 3]
    arguments = [PROGRAM, ENDLESS, *options]
    victim = Victim(mpi, 4, arguments, tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while len(victim.find_processes()) < 1 + 4 + 1 + 4:  # mpirun, ranks, the template and trainers
        assert victim.job.poll() is None
        victim.sleep(0.1)
    victim.sleep(0.5)
    assert victim.suspend(4.5)
    assert victim.wait(60) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
    assert all(list(trial.intermediate_values) == [1, 2, 3, 4] for trial in trials)


def test_unavailable_database_loses_nothing(mpi: Mpi, tmp_path: Path) -> None:
    database = tmp_path / "study.db"
    options = [
        "--run-dir",
        "run",
        "--islands",
        1,
        "--collective-timeout",
        scale(2),
        "--evaluation-timeout",
        scale(4),
        "--storage",
        f"sqlite:///{database}?timeout=0",
    ]
    arguments = [PROGRAM, ENDLESS, *options, "--set", "seconds=0.8"]
    victim = Victim(mpi, 2, [*arguments, "--evaluations", 3], tmp_path, tmp_path / "log")
    victim.wait_for("1/3")
    with sqlite3.connect(database, isolation_level=None, timeout=scale(20)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        victim.sleep(scale(5.0))
        connection.execute("COMMIT")
    status, errors = victim.wait(60)
    assert status == 0, errors
    # Optuna may also warn while a trial is added. On a busy machine, concurrent writes may also
    # take long enough for a warning.
    warning = (
        r"^warning: the storage sqlite://\S+ does not answer \(database is locked\): waiting for "
        r"at most"
    )
    assert re.search(warning, errors, re.MULTILINE), errors
    waited = re.findall(
        r"^the storage sqlite://\S+ answers again, after (\d+\.\d) s$", errors, re.MULTILINE
    )
    assert max(map(float, waited)) >= scale(4.0), errors
    assert "3 complete, of 3" in (tmp_path / "log").read_text()
    connection.execute("BEGIN EXCLUSIVE")
    again = Victim(
        mpi, 2, [*arguments, "--evaluations", 4, "--resume"], tmp_path, tmp_path / "again"
    )
    again.sleep(4.0)
    assert again.job.poll() is None
    connection.execute("COMMIT")
    connection.close()
    status, errors = again.wait(60)
    assert status == 0, errors
    assert "4 complete, of 4" in (tmp_path / "again").read_text()


@pytest.mark.slow
def test_supervise_ends_launcher_that_outlives_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As srun does if a node restarts before SLURM found it to be down."""
    monkeypatch.setattr("hpo.supervise.supervisor._SECONDS_BETWEEN_CHECKS", 0.2)
    monkeypatch.setattr("hpo.supervise.supervisor._SECONDS_FOR_LAUNCHER", 1.0)
    held = (
        "import fcntl, time; f = open('run/lock', 'a'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "time.sleep(2)"
    )
    (tmp_path / "srun").write_text(f"""#!/bin/bash
case "$*" in
  *--resume*) : > run/lock; exit 0 ;;
esac
mkdir run && echo "process 1 on elsewhere since 2026-11-25 12:00:00" > run/lock
{sys.executable} -c "{held}"
exec sleep 100
""")
    (tmp_path / "srun").chmod(0o755)
    messages: list[str] = []
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    assert Supervisor(["./srun", "--run-dir", "run"], 1, messages.append).run() == 0
    assert time.monotonic() - start < scale(40)
    assert len(messages) == 1
    assert re.match(
        r"the job ended with status 143, after 0 evaluations; restarting it", messages[0]
    )
