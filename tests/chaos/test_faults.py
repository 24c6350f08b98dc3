"""Test the events of docs/explanation/fault-tolerance.md, in MPI jobs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpo.supervise.supervisor import compute_pause
from tests.support.chaos import Victim, find_children
from tests.support.endurance import ENDLESS, FAULTY, WAYS, measure_failure_recovery, survive
from tests.support.launch import (
    ALONE,
    PROGRAM,
    ROOT,
    Mpi,
    make_hpo_command,
    wait_for_job,
    write_changed_program,
)
from tests.support.limits import scale
from tests.support.run_output import (
    find_complete_losses,
    load_trials,
    parse_lines,
    remove_loading_lines,
)
from tests.support.runs import QUICK
from tests.support.saving import make_saving_arguments

REASONS = {
    "memory": "OutOfMemoryError: injected: out of memory",
    "exit": "SystemExit: injected: exit",
    "interrupt": "KeyboardInterrupt: injected: interrupt",
    "nan": "ValueError: the validation loss is nan",
    "inf": "ValueError: the validation loss is inf",
    "text": "TypeError: an objective must yield its validation loss, a number, got 'low'",
    "nothing": "ValueError: the objective yielded no loss",
    "backward": "ValueError: injected: in the backward pass",
    "keep@training": "ValueError: injected: with the model kept",
    "comm@start": "ValueError: injected: while the others communicate",
    "speechless": "SpeechlessError: its message cannot be shown",
    "unspeakable": "ValueError: injected: \\udcff \U0001f3d6",
}


def make_faulty_arguments(*options: object, **settings: object) -> list[object]:
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    return [PROGRAM, FAULTY, "--run-dir", "run", *options, *chosen]


@pytest.mark.parametrize("size", [1, 3])
def test_failure_on_one_rank_fails_one_evaluation(mpi: Mpi, tmp_path: Path, size: int) -> None:
    times = measure_failure_recovery(mpi, size, tmp_path / "run", rounds=1)
    assert max(times.values()) < min(scale(20), 60), "no rank has waited for the timeout of 60 s"
    trials = load_trials(tmp_path / "run" / "run")
    notes = (tmp_path / "run" / f"0-{size - 1}").read_text().splitlines()
    ways = [note["way"] for note in map(json.loads, notes) if note["event"] == "starts"]
    assert (
        set(ways)
        == times.keys()
        == {way for way in WAYS if size > 1 or way not in ("differs", "fewer")}
    )
    assert len(ways) == len(trials)
    for way, trial in zip(ways, trials, strict=True):
        failure = trial.user_attrs["failure"]
        assert trial.state.name == "FAIL"
        if way == "differs":
            assert "the ranks yielded different losses: rank 0 " in failure
        elif way == "fewer":
            assert re.search(
                rf"equally many losses: rank 0 \S+ at \S+, (.*, )?rank {size - 1} ended", failure
            )
        else:
            reason = re.escape(REASONS.get(way, "ValueError: injected"))
            assert re.fullmatch(rf"rank {size - 1}, faulty.py:\d+: {reason}", failure), failure
            assert "Traceback (most recent call last)" in trial.user_attrs["traceback"]
        assert len(trial.intermediate_values) == (way in ("raise@between", "fewer")) * (
            1 if way != "fewer" else 2
        )
    for process in ("template", "first_rank"):
        descriptors = [
            note["descriptors"][process] for note in map(json.loads, notes) if "descriptors" in note
        ]
        assert descriptors[-1] <= descriptors[1] + 4, (
            f"{process} keeps descriptors of trainers: {descriptors}"
        )
    job_summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert job_summary["evaluations"]["failed"] == len(trials)


def find_position(code: str, way: str) -> str:
    """Return the file and line in faulty.py at which an evaluation waits that fails in this way."""
    lines = FAULTY.read_text().splitlines()
    function = {"stuck": "def never"}.get(way, "DONE")
    after = next(number for number, line in enumerate(lines) if function in line)
    return f"faulty.py:{next(n for n, line in enumerate(lines, 1) if n > after and code in line)}"


def test_hanging_rank_fails_one_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    """Only 2 failures are allowed before the first success.

    Later failures do not count. The path of the search file has characters outside ASCII.
    """
    search = tmp_path / "Übung 20€" / FAULTY.name
    search.parent.mkdir()
    search.write_bytes(FAULTY.read_bytes())
    ways = ["sleep", "sleep@start", "stuck", "frozen"]
    options = [
        "--collective-timeout",
        2,
        "--islands",
        1,
        "--evaluations",
        2 * len(ways),
        "--max-failures",
        2,
    ]
    arguments = [
        search if argument == FAULTY else argument
        for argument in make_faulty_arguments(*options, way=",".join(ways), every=2)
    ]
    victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / "log")
    assert victim.wait(100) == (0, "")  # This asserts that no process is left.
    trials = load_trials(tmp_path / "run")
    assert [trial.state.name for trial in trials] == ["FAIL", "COMPLETE"] * len(ways)
    for way, trial in zip(ways, trials[::2], strict=True):
        failure, traceback = trial.user_attrs["failure"], trial.user_attrs["traceback"]
        waited = (
            r"timeout: rank 0 waited 2 s \(--collective-timeout\) at faulty.py:\d+ for rank 1, "
            r"which was at "
        )
        place = "an unknown place" if way == "frozen" else find_position("time.sleep(3600)", way)
        assert re.fullmatch(f"{waited}{place}", failure), f"{way}: {failure}"
        if way != "frozen":
            assert re.search(r"Rank 1:\n(  .*\n)*    .*time.sleep\(3600\)", traceback), (
                f"{way}: {traceback}"
            )
        waits = ".*DistributedDataParallel" if way == "sleep@start" else r"dist.all_reduce\(loss\)"
        waits = (
            rf"Rank 0:\nTraceback .*\n(  .*\n)*    {waits}.*\n(.*\n)*RuntimeError: .*Timed out "
            rf"waiting"
        )
        assert re.search(waits, traceback), f"{way}: {traceback}"


def test_frozen_rank_ends_job(mpi: Mpi, tmp_path: Path) -> None:
    options = [
        "--collective-timeout",
        2,
        "--islands",
        1,
        "--evaluations",
        9,
        "--ranks-per-worker",
        1,
    ]
    victim = Victim(
        mpi, 2, make_faulty_arguments(*options, seconds=100), tmp_path, tmp_path / "log"
    )
    victim.wait_for("done  island")
    victim.sleep(1.0)
    os.kill(victim.find_ranks()[0], signal.SIGSTOP)
    status, errors = victim.wait(60)
    assert status != 0
    # On busy cores, a rank may be stopped before the others know its worker.
    rank = r"rank 0 of (worker \d|the job) on \S+"
    assert re.search(
        rf"error: nothing has come from {rank} for 2\d s \(--collective-timeout\)", errors
    ), errors
    assert find_complete_losses(load_trials(tmp_path / "run")) == {}


def test_objective_with_endless_cleanup_fails_alone(mpi: Mpi, tmp_path: Path) -> None:
    """The first evaluation fails and never finishes its cleanup.

    The second one fails and the third one completes. The cleanups of the second and third
    evaluation finish in time.
    """
    options = ["--collective-timeout", 30, "--islands", 1, "--evaluations", 3]
    settings = {"way": "differs,differs,none", "cleanup": "3600,2,2", "folder": tmp_path}
    job = mpi.run(2, *make_faulty_arguments(*options, **settings), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    endless, slow, well = load_trials(tmp_path / "run")
    for trial in (endless, slow):
        assert "the ranks yielded different losses" in trial.user_attrs["failure"]
    assert well.state.name == "COMPLETE"
    assert endless.datetime_start is not None
    assert slow.datetime_start is not None
    assert 5 < (slow.datetime_start - endless.datetime_start).total_seconds() < scale(20)
    for rank in (0, 1):
        notes = [json.loads(note) for note in (tmp_path / f"0-{rank}").read_text().splitlines()]
        assert [note["number"] for note in notes if note["event"] == "closed"] == [1, 2]


def test_evaluation_timeout_stops_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    limits = [
        "--collective-timeout",
        2,
        "--evaluation-timeout",
        "1.5s",
        "--islands",
        1,
        "--evaluations",
        2,
    ]
    job = mpi.run(
        2, *make_faulty_arguments(*limits, way="none,rest", seconds=1, epochs=9), cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (3, "")
    slow, never = load_trials(tmp_path / "run")
    assert slow.user_attrs["failure"] == "timeout: not finished after 1.5 s (--evaluation-timeout)"
    assert list(slow.intermediate_values) == [1, 2]
    rests = find_position('"rest": lambda', "rest")
    places = f"rank 0 was at {rests}, rank 1 was at {rests}"
    reason = f"timeout: not finished within --evaluation-timeout; {places}"
    assert never.user_attrs["failure"] == reason, "no rank has waited for another"
    assert list(never.intermediate_values) == []


@pytest.mark.parametrize(("name", "size"), [("USR1", 2), ("INT", 1), ("TERM", 1)])
def test_signal_stops_run_and_resume_continues(
    each_mpi: Mpi, tmp_path: Path, name: str, size: int
) -> None:
    if each_mpi.flags and name != "USR1":
        pytest.skip("Open MPI's mpirun does not forward this signal, but kills its ranks")
    arguments = make_faulty_arguments("--evaluations", 40, "--ranks-per-worker", size, seconds=30)
    victim = Victim(
        each_mpi, 2 * size, [*arguments, "--set", "way=none"], tmp_path, tmp_path / "log"
    )
    victim.wait_for("done  island")
    while len(load_trials(tmp_path / "run")) < 2:
        victim.sleep(0.2)
    victim.sleep(0.5)
    stopped_at = time.monotonic()
    victim.job.send_signal(getattr(signal, f"SIG{name}"))
    status, errors = victim.wait(30)
    assert time.monotonic() - stopped_at < scale(10)
    assert status == 75, errors
    output = (tmp_path / "log").read_text()
    assert "2 waiting to be evaluated, of 40" in output
    assert f"Stopped: SIG{name}. To resume: the same command with --run-dir run --resume" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["waiting"]) == (f"SIG{name}", 2)
    first, second, *waiting = load_trials(tmp_path / "run")
    assert [first.user_attrs["failure"], second.user_attrs["failure"]] == ["interrupted"] * 2
    assert {trial.user_attrs["retry_of"]: trial.params for trial in waiting} == {
        0: first.params,
        1: second.params,
    }
    if name == "USR1":
        again = each_mpi.run(
            1,
            *make_faulty_arguments("--resume", "--evaluations", 3, *ALONE, seconds=0),
            cwd=tmp_path,
        )
        assert again.returncode == 0, again.stderr
        assert "resumed after 0 evaluations; 2 waiting will run first" in again.stdout
        assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 3


def test_signal_on_another_rank_stops_run(mpi: Mpi, tmp_path: Path) -> None:
    program = write_changed_program(
        tmp_path,
        "from mpi4py import MPI\nfrom hpo.ranks.rank_watch import RankWatch\n\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    on_message = RankWatch._on_message\n"
        "    RankWatch._on_message = lambda self, kind, *rest: (\n"
        "        None if kind == 'stop' else on_message(self, kind, *rest)\n    )\n",
    )
    arguments = [
        program,
        ENDLESS,
        "--run-dir",
        "run",
        "--islands",
        1,
        "--evaluations",
        900,
        "--set",
        "seconds=0.4",
    ]
    victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / "log")
    victim.wait_for("\n  3/900 ")
    for pid in victim.find_ranks():
        if b"PMI_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGUSR1)
            break
    assert victim.wait(30) == (75, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "SIGUSR1"


def test_stop_before_objective_begins_ends_at_once(mpi: Mpi, tmp_path: Path) -> None:
    """The run is stopped when new trainers do not yet handle the signal that interrupts them."""
    program = write_changed_program(
        tmp_path,
        """
import os, signal, time
from hpo.evaluation.supervision import Supervision

begin = Supervision.start_objective

def begin_and_stop(self, *arguments):
    begin(self, *arguments)
    open("asked", "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGUSR1)

Supervision.start_objective = begin_and_stop
""",
    )
    victim = Victim(
        mpi, 2, [program, ENDLESS, "--run-dir", "run", "--islands", 1], tmp_path, tmp_path / "log"
    )
    assert victim.wait(60) == (75, "")
    assert time.time() - float((tmp_path / "asked").read_text()) < scale(4)
    first, waiting = load_trials(tmp_path / "run")
    assert (first.user_attrs["failure"], waiting.user_attrs["retry_of"]) == ("interrupted", 0)


def test_run_stops_at_time_limit(mpi: Mpi, tmp_path: Path) -> None:
    """Two jobs run at a time: one with a time limit, one in a SLURM job that ends a minute later.

    An epoch takes 10 minutes.
    """
    seconds = min(round(scale(14)), 30)
    jobs = {}
    for name, option in (("limit", ["--time-limit", f"{seconds}s"]), ("slurm", [])):
        arguments = make_faulty_arguments(
            "--run-dir", name, *option, "--islands", 1, "--evaluations", 40, seconds=600
        )
        end = int(time.time()) + (9999 if option else seconds + 60)
        jobs[name] = mpi.start(2, *arguments, cwd=tmp_path, SLURM_JOB_END_TIME=str(end))
    for name, reason in (("limit", "--time-limit .*"), ("slurm", "the end of the job")):
        job = wait_for_job(jobs[name])
        assert (job.returncode, job.stderr) == (75, "")
        resume = f"To resume: the same command with --run-dir {name} --resume"
        assert re.search(rf"^Stopped: {reason}\. {resume}", job.stdout, re.MULTILINE), job.stdout
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["wall_seconds"] < seconds + scale(16), (
            "without the start and the exit of Python"
        )


def test_second_interrupt_stops_hanging_run_at_once(mpi: Mpi, tmp_path: Path) -> None:
    arguments = make_faulty_arguments("--islands", 1, way="stuck@start", rank=0, folder=tmp_path)
    victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while "fails" not in "".join(path.read_text() for path in tmp_path.glob("0-0")):
        assert victim.job.poll() is None
        victim.sleep(0.05)
    victim.sleep(0.5)
    rank = victim.find_ranks()[1]
    stopped_at = time.monotonic()
    os.kill(rank, signal.SIGINT)
    victim.sleep(1.5)
    os.kill(rank, signal.SIGINT)
    status, errors = victim.wait(30)
    assert status != 0
    assert time.monotonic() - stopped_at < scale(5)
    assert "stopped at once" in errors


def test_internal_error_ends_job_with_one_traceback(each_mpi: Mpi, tmp_path: Path) -> None:
    program = write_changed_program(
        tmp_path,
        "import hpo.store.record\nhpo.store.record.Record.complete = lambda *_: 1 / 0  # in the "
        "thread of the writer\n",
    )
    layout = ["--ranks-per-worker", 1]
    victim = Victim(
        each_mpi, 2, [program, QUICK, "--run-dir", "run", *layout], tmp_path, tmp_path / "log"
    )
    status, errors = victim.wait(60)
    assert status != 0
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert errors.count("ZeroDivisionError: division by zero") == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "lock",
        "run.json",
        "search_space-1.py",
        "study.log",
    ]


def test_trainers_that_cannot_connect_name_the_reason(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.start(
        2, *make_faulty_arguments("--evaluations", 2), cwd=tmp_path, GLOO_SOCKET_IFNAME="ib7"
    )
    assert wait_for_job(job).returncode == 3
    for trial in load_trials(tmp_path / "run"):
        failure = trial.user_attrs["failure"]
        assert "cannot connect to its peers (GLOO_SOCKET_IFNAME=ib7): " in failure
        assert "Unable to find address for: ib7" in failure


def test_ranks_end_if_mpirun_is_killed_at_start(each_mpi: Mpi, tmp_path: Path) -> None:
    program = write_changed_program(
        tmp_path,
        "import os\nimport time\n\nmpirun = os.getppid()\nprint('here', flush=True)\n"
        "while os.getppid() == mpirun:\n    time.sleep(0.01)\n",
    )
    victim = Victim(each_mpi, 2, [program, QUICK, "--run-dir", "run"], tmp_path, tmp_path / "log")
    victim.wait_for("here\nhere")
    victim.kill("mpirun", random.Random(0))
    victim.wait(30)  # This fails if any process is left.
    assert not (tmp_path / "run").exists()


def test_killed_run_loses_no_reported_evaluation(each_mpi: Mpi, tmp_path: Path) -> None:
    tally = survive(each_mpi, tmp_path / "run", random.Random(2), budget=30, most_kills=2)
    assert tally.kills == 2
    assert tally.finished == 30
    assert tally.trainers + tally.templates >= 2
    assert tally.readings > 10


def test_supervise_restarts_job_that_crashes(mpi: Mpi, tmp_path: Path) -> None:
    arguments = ["--ranks-per-worker", "1", "--evaluations", "30", "--set", "seconds=0.5"]
    command = mpi.make_command(2, PROGRAM, QUICK, "--run-dir", "run", *arguments)
    log = tmp_path / "log"

    def has_progress(restarts: int) -> bool:
        """Return whether the job has finished three evaluations after these restarts."""
        jobs = log.read_text().split("restarting it")
        return len(jobs) > restarts and len(parse_lines(jobs[restarts])) >= 3

    with log.open("w") as out:
        supervisor = subprocess.Popen(
            make_hpo_command("supervise", "--max-restarts", 1, *command),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
        )
    try:
        for restarts in (0, 1):
            end = time.monotonic() + scale(60)
            while not has_progress(restarts) and time.monotonic() < end:
                time.sleep(0.05)
            (mpirun,) = find_children(supervisor.pid)
            os.kill(mpirun, signal.SIGKILL)
        assert supervisor.wait(90) == 0
    finally:
        supervisor.kill()
    output = log.read_text()
    assert (
        len(
            re.findall(
                r"hpo supervise: the job ended with status 137, after \d+ evaluations.*; "
                r"restarting it",
                output,
            )
        )
        == 2
    )
    assert "30 complete, of 30" in output
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 30


@pytest.mark.slow
def test_supervise_gives_up_without_progress(tmp_path: Path) -> None:
    def supervise(*command: object, restarts: int = 2) -> subprocess.CompletedProcess[str]:
        line = make_hpo_command("supervise", "--max-restarts", restarts, *command)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            line,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=scale(60),
            check=False,
        )

    crashing = supervise("bash", "-c", "exit 7", "--run-dir", "run")
    assert crashing.returncode == 7
    assert crashing.stdout.splitlines() == [
        "hpo supervise: the job ended with status 7, after 0 evaluations; restarting it (1 of 2 "
        "without progress)",
        "hpo supervise: the job ended with status 7, after 0 evaluations; restarting it (2 of 2 "
        "without progress)",
        "hpo supervise: the job ended with status 7, after 0 evaluations; gave up after 2 "
        "restarts without progress",
    ]
    for status in (0, 2, 3, 75):
        final = supervise("bash", "-c", f"exit {status}", "--run-dir=run")
        assert (final.returncode, final.stdout) == (status, "")
    nameless = supervise("bash", "-c", "exit 0")
    assert (nameless.returncode, remove_loading_lines(nameless.stdout)) == (2, "")
    assert "error: the command must have --run-dir" in nameless.stderr
    missing = supervise("mpirum", "--run-dir", "run")
    assert (missing.returncode, missing.stderr) == (
        2,
        "error: mpirum cannot be started: No such file or directory\n",
    )
    assert supervise("true", "--run-dir", "run", restarts=-1).returncode == 2
    assert [compute_pause(times) for times in (1, 2, 7, 5000)] == [1, 2, 60, 60]


def test_supervise_stopped_at_start_stops_job(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "trap 'exit 75' USR1\ntouch started\nfor i in $(seq 600); do sleep 0.1; done\n"
    )
    command = make_hpo_command(
        "supervise", "bash", "-c", "kill -TERM $PPID; source job.sh", "--run-dir", "run"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    stopped = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=scale(40)
    )
    assert stopped.returncode == 75


@pytest.fixture
def umask() -> Iterator[None]:
    """Set the umask so that only the user and the group can read new files."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_run_directory_is_locked_until_its_run_ends(mpi: Mpi, tmp_path: Path) -> None:
    """Files that ranks and trainers write must also have the permissions that the umask allows."""
    (tmp_path / "start.json").write_text('[{"x": 0.5}]')
    options = ["--resume", "--evaluations", 6, "--checkpoint-every", "1s"]
    first = Victim(
        mpi, 2, make_saving_arguments("run", *options, epochs=900), tmp_path, tmp_path / "log"
    )
    assert first.wait_for("done  island")
    for rank in first.find_ranks():
        shared = re.findall(r"/dev/shm/mpich_\S+(.*)", Path(f"/proc/{rank}/maps").read_text())
        assert set(shared) == {" (deleted)"}, (
            "MPICH's file has a name, so it would stay after a kill"
        )
    run_json = (tmp_path / "run" / "run.json").read_text()
    again = make_saving_arguments("run", *options, "--ranks-per-worker", 1, epochs=2, seconds=0)
    second = mpi.run(1, *again, cwd=tmp_path)
    assert (second.returncode, remove_loading_lines(second.stdout)) == (2, "")
    (holder,) = [pid for pid in first.find_ranks() if f"process {pid} on " in second.stderr]
    host = re.escape(socket.gethostname())
    assert re.match(
        rf"error: run is in use by process {holder} on {host} since \d{{4}}-", second.stderr
    )
    assert (tmp_path / "run" / "run.json").read_text() == run_json
    while not list((tmp_path / "run").glob("checkpoints/[0-9]*")):
        assert first.job.poll() is None
        first.sleep(0.1)
    first.kill("all", random.Random(0))
    first.wait()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("[0-9]*")
    assert [oct(path.stat().st_mode & 0o777) for path in (checkpoint, checkpoint.parent)] == [
        "0o640",
        "0o750",
    ]
    third = mpi.launch(1, *again, cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert "6 complete, of 6" in third.stdout
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "run").iterdir()}
    files = [
        "lock",
        "report.html",
        "run.json",
        "search_space-1.py",
        "study.log",
        "summary.json",
        "best.safetensors",
    ]
    assert modes == dict.fromkeys(files, "0o640")


def test_run_without_success_shows_failures_and_stops(mpi: Mpi, tmp_path: Path) -> None:
    small = ["--ranks-per-worker", 1]
    job = mpi.run(
        2,
        *make_faulty_arguments("--evaluations", 9, *small, way="raise@start,nan", rank=0),
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (3, "")
    assert "No evaluation succeeded.\n\nFailures\n" in job.stdout
    counted = re.findall(r"^ +(\d+)   (faulty.py:\d+: ValueError: .+)$", job.stdout, re.MULTILINE)
    trials = Counter(
        trial.user_attrs["failure"].removeprefix("rank 0, ")
        for trial in load_trials(tmp_path / "run")
    )
    assert {reason: int(count) for count, reason in counted} == trials
    assert trials.total() == 9
    early = mpi.run(
        2,
        *make_faulty_arguments(
            "--run-dir", "early", "--evaluations", 900, "--max-failures", 5, *small, way="nan"
        ),
        cwd=tmp_path,
    )
    assert (early.returncode, early.stderr) == (3, "")
    assert "Stopped: 5 evaluations failed and none succeeded (--max-failures)" in early.stdout
    assert (
        5
        <= sum(
            trial.user_attrs.get("failure") != "interrupted"
            for trial in load_trials(tmp_path / "early")
        )
        < 10
    )


def test_full_disk_ends_job_and_loses_nothing(mpi: Mpi, tmp_path: Path) -> None:
    """The weights that trainers write never fit on the disk.

    So each new best evaluation causes a warning.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if (
        os.geteuid()
        or subprocess.run(mount, capture_output=True, check=False, timeout=scale(20)).returncode
    ):
        pytest.skip("a small disk needs root and the permission to mount it")
    try:
        (tmp_path / "start.json").write_text('[{"x": 0.5}]')
        settings = {"saves": "state", "epochs": 3, "seconds": 0.01}
        arguments = make_saving_arguments(str(disk / "run"), "--resume", **settings, width=20_000)
        arguments = [*arguments, "--evaluations"]
        command = [*arguments, 500, "--ranks-per-worker", 1]
        victim = Victim(mpi, 2, command, tmp_path, tmp_path / "log")
        status, errors = victim.wait(90)
        assert status not in (0, 75)
        message = (
            "error: .*/run/study.log cannot be written: No space left on device. It is undamaged"
        )
        assert len(re.findall(message, errors)) == 1, errors
        assert "Traceback" not in errors
        assert re.match(
            r"warning: the weights of the best so far cannot be kept in .*: .* must stay free for "
            r"the record",
            errors,
        )
        names = ["lock", "run.json", "search_space-1.py", "study.log"]
        assert sorted(path.name for path in (disk / "run").iterdir()) == names, "drafts are removed"
        reported = {
            (line["worker"], line["generation"])
            for line in parse_lines((tmp_path / "log").read_text())
        }
        complete = find_complete_losses(load_trials(disk / "run"))
        assert len(complete) >= len(reported) > 5
        full = mpi.run(1, *arguments, 500, *ALONE, cwd=tmp_path)
        assert (full.returncode, remove_loading_lines(full.stdout)) == (2, "")
        assert re.match(
            r"error: .* cannot be (written|used): No space left on device[^\n]*\n$", full.stderr
        )
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True, timeout=scale(20))
        more = len(complete) + 5
        again = mpi.run(1, *arguments, more, *ALONE, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        after = find_complete_losses(load_trials(disk / "run"))
        assert {number: after[number] for number in complete} == complete
        assert len(after) == more
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=scale(20))
