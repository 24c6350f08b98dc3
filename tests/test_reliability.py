"""What docs/reliability.md promises, on real jobs that fail, hang, are killed and are told to stop."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hpo.run.supervisor import pause_after
from tests.support.chaos import Victim, children
from tests.support.endurance import FAULTY, WAYS, recovery_times, survive
from tests.support.launch import ALONE, PROGRAM, ROOT, SEARCHES, Mpi, changed_program, finish, hpo_line
from tests.support.outcome import finished, lines_of, trials_of
from tests.support.runs import QUICK

REASONS = {
    "memory": "OutOfMemoryError: injected: out of memory",
    "exit": "SystemExit: injected: exit",
    "interrupt": "KeyboardInterrupt: injected: interrupt",
    "nan": "ValueError: the validation loss is nan",
    "inf": "ValueError: the validation loss is inf",
    "text": "TypeError: an objective yields its validation loss, a number, not 'low'",
    "nothing": "ValueError: the objective yielded no loss",
    "backward": "ValueError: injected: in the backward pass",
    "keep@training": "ValueError: injected: with the model kept",
    "comm@start": "ValueError: injected: while the others communicate",
    "speechless": "SpeechlessError: its message cannot be shown",
    "unspeakable": "ValueError: injected: \\udcff \U0001f3d6",
}


def faulty(*options: object, **settings: object) -> list[object]:
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    return [PROGRAM, FAULTY, "--run-dir", "run", *options, *chosen]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_whatever_fails_on_a_rank_costs_one_evaluation(mpi: Mpi, tmp_path: Path, size: int) -> None:
    times = recovery_times(mpi, size, tmp_path / "run", rounds=1)
    assert max(times.values()) < 20, "nobody has waited for a timeout, which is 60 s"
    trials = trials_of(tmp_path / "run" / "run")
    notes = (tmp_path / "run" / f"0-{size - 1}").read_text().splitlines()
    ways = [note["way"] for note in map(json.loads, notes) if note["event"] == "starts"]
    assert set(ways) == times.keys() == {way for way in WAYS if size > 1 or way not in ("differs", "fewer")}
    assert len(ways) == len(trials)
    for way, trial in zip(ways, trials, strict=True):
        failure = trial.user_attrs["failure"]
        assert trial.state.name == "FAIL"
        if way == "differs":
            assert "the ranks yielded different losses: rank 0 " in failure
        elif way == "fewer":
            assert re.search(rf"equally many losses: rank 0 \S+ at \S+, (.*, )?rank {size - 1} ended", failure)
        else:
            reason = re.escape(REASONS.get(way, "ValueError: injected"))
            assert re.fullmatch(rf"rank {size - 1}, faulty.py:\d+: {reason}", failure), failure
            assert "Traceback (most recent call last)" in trial.user_attrs["traceback"]
        assert len(trial.intermediate_values) == (way in ("raise@between", "fewer")) * (1 if way != "fewer" else 2)
    descriptors = [json.loads(note)["descriptors"] for note in notes if "descriptors" in note]
    assert descriptors[-1] <= descriptors[1] + 16, f"more than one model that is kept: {descriptors}"
    job_summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert job_summary["evaluations"]["failed"] == len(trials)


def line_of(code: str, way: str) -> str:
    """Return the place in faulty.py at which a way to fail waits."""
    lines = FAULTY.read_text().splitlines()
    after = next(number for number, line in enumerate(lines) if ("def ignore" if way == "swallow" else "DONE") in line)
    return f"faulty.py:{next(n for n, line in enumerate(lines, 1) if n > after and code in line)}"


@pytest.mark.parametrize(("way", "size", "rank"), [("sleep", 2, 1), ("sleep@start", 3, 0), ("swallow", 2, 0)])
def test_a_rank_that_sleeps_costs_one_evaluation(mpi: Mpi, tmp_path: Path, way: str, size: int, rank: int) -> None:
    options = ["--collective-timeout", "3s", "--evaluations", 3, "--islands", 1, "--ranks-per-worker", size]
    job = mpi.run(size, *faulty(*options, way=way, rank=rank, every=3), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    first, *others = trials_of(tmp_path / "run")
    failure = first.user_attrs["failure"]
    waited = r"timeout: rank \d waited 3 s \(--collective-timeout\) at faulty.py:\d+"
    assert re.match(rf"{waited} for rank {rank}, which was at {line_of('time.sleep(3600)', way)}$", failure)
    assert re.search(rf"Rank {rank}:\n(  .*\n)*    .*time.sleep\(3600\)", first.user_attrs["traceback"])
    assert [trial.state.name for trial in others] == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize(
    ("way", "ranks", "message"),
    [
        (
            "stuck",
            4,
            r"error: rank 1 of worker [01] on \S+: it is stuck: its evaluation was called off 2 s ago .*\n"
            r'(  File ".*faulty\.py", .*\n    .*\n)+  File ".*", .* in never_return\n    time\.sleep\(3600\)\n',
        ),
        (
            "frozen",
            2,
            r"error: rank 0 of worker 0 on \S+ waits in vain for rank 1 of worker 0 on \S+: .* 2 s ago .*, and one of "
            "them is gone",
        ),
    ],
)
def test_a_rank_that_cannot_be_recovered_ends_the_job(
    each_mpi: Mpi, tmp_path: Path, way: str, ranks: int, message: str
) -> None:
    options = ["--collective-timeout", 2, "--islands", 1, "--evaluations", 9]
    log = tmp_path / "log"
    victim = Victim(each_mpi, ranks, faulty(*options, way=way, every=2, rank=1), tmp_path, log)
    status, errors = victim.wait(60)  # asserts that no process is left
    assert status != 0
    assert re.search(message, errors), errors
    assert "Traceback" not in errors
    assert errors.count("error:") == 1
    assert finished(trials_of(tmp_path / "run")) == {}


def test_a_worker_of_one_rank_that_is_gone_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--collective-timeout", 2, "--islands", 1, "--evaluations", 9, "--ranks-per-worker", 1]
    victim = Victim(mpi, 2, faulty(*options, seconds=100), tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    victim.sleep(1.0)
    os.kill(victim.rank_processes()[0], signal.SIGSTOP)
    status, errors = victim.wait(60)
    assert status != 0
    assert re.search(
        r"error: nothing has come from rank 0 of worker \d on \S+ for 2\d s \(--collective-timeout\)", errors
    ), errors
    assert finished(trials_of(tmp_path / "run")) == {}


def test_an_objective_that_does_not_close_costs_one_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--collective-timeout", 30, "--islands", 1, "--evaluations", 3]
    job = mpi.run(2, *faulty(*options, way="differs", every=9, cleanup=2), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    options[-1] = 1
    job = mpi.run(2, *faulty(*options, "--run-dir", "long", way="differs", every=1, cleanup=3600), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (3, "")
    (trial,) = trials_of(tmp_path / "long")
    assert "the ranks yielded different losses" in trial.user_attrs["failure"]


def test_an_evaluation_that_takes_too_long_is_stopped(mpi: Mpi, tmp_path: Path) -> None:
    limits = ["--collective-timeout", 2, "--evaluation-timeout", "1.5s", "--islands", 1, "--evaluations", 2]
    job = mpi.run(2, *faulty(*limits, seconds=1, epochs=9), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (3, "")
    trials = trials_of(tmp_path / "run")
    assert len(trials) == 2
    for trial in trials:
        assert trial.user_attrs["failure"] == "timeout: still going on after 1.5 s (--evaluation-timeout)"
        assert list(trial.intermediate_values) == [1, 2]
    options = ["--ranks-per-worker", 1, "--run-dir", "other"]
    job = mpi.run(1, *faulty(*limits, *options, way="sleep", every=2), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    never, well = trials_of(tmp_path / "other")
    assert never.user_attrs["failure"].startswith("timeout: no loss came at which to stop it (--evaluation-timeout)")
    assert well.state.name == "COMPLETE"


@pytest.mark.parametrize(("name", "size"), [("USR1", 2), ("INT", 1), ("TERM", 1)])
def test_a_signal_stops_a_run_well(each_mpi: Mpi, tmp_path: Path, name: str, size: int) -> None:
    if each_mpi.flags and name != "USR1":
        pytest.skip("Open MPI's mpirun does not pass this one on, but kills its ranks")
    arguments = faulty("--evaluations", 40, "--ranks-per-worker", size, seconds=30)
    victim = Victim(each_mpi, 2 * size, [*arguments, "--set", "way=none"], tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while len(trials_of(tmp_path / "run")) < 2:
        victim.sleep(0.2)
    victim.sleep(0.5)
    asked = time.monotonic()
    victim.job.send_signal(getattr(signal, f"SIG{name}"))
    status, errors = victim.wait(30)
    assert time.monotonic() - asked < 10
    assert status == 75, errors
    output = (tmp_path / "log").read_text()
    assert "2 waiting to be evaluated, of 40" in output
    assert f"Stopped: SIG{name}. To go on: the same command with --run-dir run --resume" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["stopped"], summary["waiting"]) == (f"SIG{name}", 2)
    first, second, *waiting = trials_of(tmp_path / "run")
    assert [first.user_attrs["failure"], second.user_attrs["failure"]] == ["interrupted"] * 2
    assert {trial.user_attrs["repeats"]: trial.params for trial in waiting} == {0: first.params, 1: second.params}
    again = each_mpi.run(1, *faulty("--resume", "--evaluations", 3, *ALONE, seconds=0), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on after 0 evaluations; 2 that wait will be evaluated first" in again.stdout
    assert len(finished(trials_of(tmp_path / "run"))) == 3


def test_a_run_that_trains_stops_well(mpi: Mpi, tmp_path: Path) -> None:
    long = ["--set", "epochs=10000", "--set", "patience=10000"]
    victim = Victim(mpi, 4, [PROGRAM, "--run-dir", "run", *long], tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while sum(bool(trial.intermediate_values) for trial in trials_of(tmp_path / "run")) < 2:
        victim.sleep(0.2)
    asked = time.monotonic()
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")
    assert time.monotonic() - asked < 10
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["waiting"] == 2


def forking(mpi: Mpi, folder: Path, program: Path = PROGRAM) -> Victim:
    """Start a run on two ranks whose objective forks, and wait until it has evaluated some of very many."""
    arguments = [program, SEARCHES / "forking.py", "--run-dir", "run", "--islands", 1, "--evaluations", 900]
    victim = Victim(mpi, 2, arguments, folder, folder / "log")
    victim.wait_for(" 3/900 ")
    return victim


def test_processes_of_an_objective_are_no_ranks_and_do_not_keep_signals_from_the_run(mpi: Mpi, tmp_path: Path) -> None:
    victim = forking(mpi, tmp_path)
    rank = victim.rank_processes()[1]
    os.kill(rank, signal.SIGUSR1)
    status, errors = victim.wait(30)
    assert status == 75, errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "SIGUSR1"
    assert set(finished(trials_of(tmp_path / "run")).values()) == {1.0}


def test_a_stop_that_only_another_rank_has_heard_of_is_the_runs(mpi: Mpi, tmp_path: Path) -> None:
    program = changed_program(
        tmp_path,
        "from mpi4py import MPI\nfrom hpo.ranks.watch import Watch\n\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    heard = Watch._on_message\n"
        "    Watch._on_message = lambda self, kind, *rest: None if kind == 'stop' else heard(self, kind, *rest)\n",
    )
    victim = forking(mpi, tmp_path, program)
    for pid in sorted(victim.rank_processes()):  # the oldest first, and not what a rank has just forked
        if b"PMI_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGUSR1)
            break
    assert victim.wait(30) == (75, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "SIGUSR1"


@pytest.mark.parametrize("limit", ["--time-limit", "SLURM"])
def test_a_run_stops_when_its_time_is_over(
    mpi: Mpi, tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + (66 if limit == "SLURM" else 9999)))
    option = ["--time-limit", "0:06"] if limit == "--time-limit" else []
    start = time.monotonic()
    job = mpi.run(2, *faulty(*option, "--islands", 1, "--evaluations", 40, seconds=60), cwd=tmp_path)
    assert 5 < time.monotonic() - start < 40, "an epoch takes 60 s"
    assert (job.returncode, job.stderr) == (75, "")
    reason = "--time-limit 6.0 s" if option else "the end of the SLURM job"
    assert f"Stopped: {reason}. To go on: the same command with --run-dir run --resume" in job.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["wall_seconds"] < 16, "without what it takes to start and to leave Python, on cores that others use"


def test_a_run_with_a_stuck_rank_stops_all_the_same_and_at_once_if_asked_twice(mpi: Mpi, tmp_path: Path) -> None:
    for asked_twice in (False, True):
        name, notes = f"run{asked_twice}", tmp_path / f"notes{asked_twice}"
        notes.mkdir()
        arguments = faulty("--run-dir", name, "--islands", 1, way="stuck@start", rank=0, folder=notes)
        victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / f"{name}.log")
        victim.wait_for("done  island")
        while "fails" not in "".join(path.read_text() for path in notes.glob("0-0")):
            assert victim.job.poll() is None
            victim.sleep(0.05)
        victim.sleep(0.5)
        rank = victim.rank_processes()[1]
        asked = time.monotonic()
        os.kill(rank, signal.SIGINT)
        if asked_twice:
            victim.sleep(1.5)
            os.kill(rank, signal.SIGINT)
        status, errors = victim.wait(30)
        assert status != 0
        assert time.monotonic() - asked < (5 if asked_twice else 11)
        if asked_twice:
            assert "stopped at once" in errors
        else:
            assert status in (75, 9), "MPICH's mpirun may give the signal with which it ends the rank that is stuck"
            assert json.loads((tmp_path / name / "summary.json").read_text())["stopped"] == "SIGINT"
            assert "\nStopped: SIGINT" in (tmp_path / f"{name}.log").read_text(), "the program's words are not marked"


def test_a_bug_in_the_program_ends_the_job_with_one_traceback(each_mpi: Mpi, tmp_path: Path) -> None:
    program = changed_program(
        tmp_path, "import hpo.store.record\nhpo.store.record.Record.complete = lambda *_: 1 / 0  # in its writer\n"
    )
    layout = ["--ranks-per-worker", 1]
    victim = Victim(each_mpi, 2, [program, QUICK, "--run-dir", "run", *layout], tmp_path, tmp_path / "log")
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


def test_ranks_that_cannot_connect_say_so_in_a_line(each_mpi: Mpi, tmp_path: Path) -> None:
    job = each_mpi.start(2, PROGRAM, "--run-dir", "run", cwd=tmp_path, GLOO_SOCKET_IFNAME="ib7")
    result = finish(job)
    assert result.returncode != 0
    assert result.stderr.count("cannot connect to its peers (GLOO_SOCKET_IFNAME=ib7): ") == 1, result.stderr
    assert "Unable to find address for: ib7" in result.stderr
    assert "Traceback" not in result.stderr
    assert not finished(trials_of(tmp_path / "run"))


def test_a_rank_that_dies_while_its_peers_connect_leaves_no_traceback(each_mpi: Mpi, tmp_path: Path) -> None:
    program = changed_program(
        tmp_path,
        "import os\nimport signal\nimport time\nimport torch.distributed as dist\nfrom mpi4py import MPI\n\n"
        "connect = dist.init_process_group\n\n\n"
        "def die_or_connect(*arguments, **options):\n"
        "    if MPI.COMM_WORLD.rank == 2:  # whose store its peer is connected to\n"
        "        time.sleep(1)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    connect(*arguments, **options)\n\n\n"
        "dist.init_process_group = die_or_connect\n",
    )
    job = each_mpi.run(4, program, QUICK, "--run-dir", "run", "--ranks-per-worker", 2, "--islands", 1, cwd=tmp_path)
    assert job.returncode != 0
    assert "Traceback" not in job.stderr, job.stderr
    assert "error:" not in job.stderr, "its peers took its death for a mistake"


def test_ranks_whose_mpirun_is_killed_before_they_have_begun_do_not_stay(each_mpi: Mpi, tmp_path: Path) -> None:
    program = changed_program(
        tmp_path,
        "import os\nimport time\n\nmpirun = os.getppid()\nprint('here', flush=True)\n"
        "while os.getppid() == mpirun:\n    time.sleep(0.01)\n",
    )
    victim = Victim(each_mpi, 2, [program, QUICK, "--run-dir", "run"], tmp_path, tmp_path / "log")
    victim.wait_for("here\nhere")
    victim.kill("mpirun", random.Random(0))
    victim.wait(30)  # which fails where a process is left
    assert not (tmp_path / "run").exists()


def test_nothing_that_was_reported_is_lost_when_a_run_is_killed(each_mpi: Mpi, tmp_path: Path) -> None:
    tally = survive(each_mpi, tmp_path / "run", random.Random(2), budget=30, most_kills=2)
    assert tally.kills == 2
    assert tally.finished == 30
    assert tally.readings > 10


@pytest.mark.mpi
def test_a_job_that_crashes_is_started_again(tmp_path: Path) -> None:
    arguments = ["--ranks-per-worker", "1", "--evaluations", "14", "--set", "seconds=0.3"]
    command = ["mpirun", "-n", "2", sys.executable, PROGRAM, QUICK, "--run-dir", "run", *arguments]
    log = tmp_path / "log"
    with log.open("w") as out:
        supervisor = subprocess.Popen(
            hpo_line("run", "--restarts", 1, *command),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
        )
    try:
        for crash in (1, 2):  # with progress in between
            end = time.monotonic() + 60
            while len(lines_of(log.read_text())) < 3 * crash and time.monotonic() < end:
                time.sleep(0.05)
            (mpirun,) = children(supervisor.pid)
            os.kill(mpirun, signal.SIGKILL)
        assert supervisor.wait(60) == 0
    finally:
        supervisor.kill()
    output = log.read_text()
    assert (
        len(re.findall(r"hpo run: the job ended with status 137, after \d+ evaluations.*; starting it again", output))
        == 2
    )
    assert "14 complete, of 14" in output
    assert len(finished(trials_of(tmp_path / "run"))) == 14


@pytest.mark.slow
def test_a_job_that_crashes_in_vain_is_given_up(tmp_path: Path) -> None:
    def supervise(*command: object, restarts: int = 2) -> subprocess.CompletedProcess[str]:
        line = hpo_line("run", "--restarts", restarts, *command)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    crashing = supervise("bash", "-c", "exit 7", "--run-dir", "run")
    assert crashing.returncode == 7
    assert crashing.stdout.splitlines() == [
        "hpo run: the job ended with status 7, after 0 evaluations; starting it again (1 of 2 without progress)",
        "hpo run: the job ended with status 7, after 0 evaluations; starting it again (2 of 2 without progress)",
        "hpo run: the job ended with status 7, after 0 evaluations; started again 2 times without progress: giving up",
    ]
    for status in (0, 2, 3, 75):
        final = supervise("bash", "-c", f"exit {status}", "--run-dir=run")
        assert (final.returncode, final.stdout) == (status, "")
    nameless = supervise("bash", "-c", "exit 0")
    assert (nameless.returncode, nameless.stdout) == (2, "")
    assert "error: name the run's directory in the command" in nameless.stderr
    missing = supervise("mpirum", "--run-dir", "run")
    assert (missing.returncode, missing.stderr) == (2, "error: mpirum cannot be started: No such file or directory\n")
    assert supervise("true", "--run-dir", "run", restarts=-1).returncode == 2
    assert [pause_after(times) for times in (1, 2, 7, 5000)] == [1, 2, 60, 60]


def test_a_supervisor_that_is_told_to_stop_while_it_starts_the_job_stops_it(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("trap 'exit 75' USR1\ntouch started\nfor i in $(seq 600); do sleep 0.1; done\n")
    command = hpo_line("run", "bash", "-c", "kill -TERM $PPID; source job.sh", "--run-dir", "run")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    stopped = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=40)
    assert stopped.returncode == 75


def test_two_runs_cannot_share_a_directory_and_a_dead_one_does_not_keep_it(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [PROGRAM, QUICK, "--run-dir", "run", "--resume", "--islands", 1, "--evaluations", 6]
    first = Victim(mpi, 2, [*arguments, "--set", "seconds=20"], tmp_path, tmp_path / "log")
    first.wait_for("done  island")
    for rank in first.rank_processes():
        shared = re.findall(r"/dev/shm/mpich_\S+(.*)", Path(f"/proc/{rank}/maps").read_text())
        assert set(shared) == {" (deleted)"}, "MPICH's file, which nobody would remove after a kill, has a name"
    run_json = (tmp_path / "run" / "run.json").read_text()
    second = mpi.run(1, *arguments, "--ranks-per-worker", 1, cwd=tmp_path)
    assert (second.returncode, second.stdout) == (2, "")
    (holder,) = [pid for pid in first.rank_processes() if f"process {pid} on " in second.stderr]
    host = re.escape(socket.gethostname())
    assert re.match(rf"error: run is in use by process {holder} on {host} since \d{{4}}-", second.stderr)
    assert (tmp_path / "run" / "run.json").read_text() == run_json
    first.kill("all", random.Random(0))
    first.wait()
    third = mpi.run(1, *arguments, "--ranks-per-worker", 1, "--set", "seconds=0", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert "6 complete, of 6" in third.stdout


def test_a_run_in_which_everything_fails_says_why_and_stops_early_if_asked(mpi: Mpi, tmp_path: Path) -> None:
    small = ["--ranks-per-worker", 1]
    job = mpi.run(2, *faulty("--evaluations", 9, *small, way="raise@start,nan", rank=0), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (3, "")
    assert "No evaluation succeeded.\nFailures\n" in job.stdout
    counted = re.findall(r"^ +(\d+)   (faulty.py:\d+: ValueError: .+)$", job.stdout, re.MULTILINE)
    trials = Counter(trial.user_attrs["failure"].removeprefix("rank 0, ") for trial in trials_of(tmp_path / "run"))
    assert {reason: int(count) for count, reason in counted} == trials
    assert trials.total() == 9
    early = mpi.run(
        2, *faulty("--run-dir", "early", "--evaluations", 900, "--max-failures", 5, *small, way="nan"), cwd=tmp_path
    )
    assert (early.returncode, early.stderr) == (3, "")
    assert "Stopped: 5 evaluations failed and none succeeded (--max-failures)" in early.stdout
    assert 5 <= sum(trial.user_attrs.get("failure") != "interrupted" for trial in trials_of(tmp_path / "early")) < 10
    mixed = faulty("--run-dir", "mixed", "--evaluations", 12, "--max-failures", 3, way="none,nan,nan,nan", rank=0)
    assert mpi.run(1, *mixed, *ALONE, cwd=tmp_path).returncode == 0, "something has succeeded"


def test_files_have_the_permissions_that_people_ask_for(mpi: Mpi, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        mpi.run(1, PROGRAM, QUICK, "--run-dir", "run", *ALONE, "--evaluations", 2, cwd=tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "run").iterdir()}
    names = ("lock", "report.html", "run.json", "search_space-1.py", "study.log", "summary.json")
    assert modes == dict.fromkeys(names, "0o640")


def test_a_full_disk_ends_the_job_and_loses_nothing(mpi: Mpi, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode:
        pytest.skip("a small disk needs root, and leave to mount it")
    try:
        arguments = [PROGRAM, QUICK, "--run-dir", disk / "run", "--resume", "--evaluations"]
        command = [*arguments, 500, "--ranks-per-worker", 1, "--set", "seconds=0.01"]
        victim = Victim(mpi, 2, command, tmp_path, tmp_path / "log")
        status, errors = victim.wait(90)
        assert status not in (0, 75)
        message = "error: .*/run/study.log cannot be written: No space left on device; what it holds is whole"
        assert len(re.findall(message, errors)) == 1, errors
        assert "Traceback" not in errors
        reported = {(line["worker"], line["generation"]) for line in lines_of((tmp_path / "log").read_text())}
        complete = finished(trials_of(disk / "run"))
        assert len(complete) >= len(reported) > 5
        full = mpi.run(1, *arguments, 500, *ALONE, cwd=tmp_path)
        assert (full.returncode, full.stdout) == (2, "")
        assert re.match(r"error: .* cannot be (written|used): No space left on device[^\n]*\n$", full.stderr)
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True, timeout=20)
        more = len(complete) + 5
        again = mpi.run(1, *arguments, more, *ALONE, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        after = finished(trials_of(disk / "run"))
        assert {number: after[number] for number in complete} == complete
        assert len(after) == more
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=20)
