"""Kill or suspend runs, or let evaluations fail in many ways.

Count lost results, and measure recovery times.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import optuna

from benchmarks.slow import slow_files
from tests.searches.dying import CRASHES
from tests.support import crashes
from tests.support.chaos import Victim
from tests.support.crashes import kill_on_request, make_dying_arguments
from tests.support.launch import PROGRAM, ROOT, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import load_trials, parse_lines

FAULTY = SEARCHES / "faulty.py"
ENDLESS = SEARCHES / "endless.py"
# Ranks, ranks per worker, islands.
LAYOUTS = [(4, 2, 2), (4, 1, 2), (3, 3, 1), (6, 2, 1), (2, 2, 1)]
WAYS = [
    *(
        "raise@start",
        "raise@training",
        "raise",
        "raise@between",
        "backward",
        "keep@training",
        "memory",
        "exit",
    ),
    *(
        "interrupt",
        "nan",
        "inf",
        "text",
        "nothing",
        "differs",
        "fewer",
        "comm@start",
        "speechless",
        "unspeakable",
    ),
]
FOR_SEVERAL_RANKS = {"differs", "fewer"}

Key = tuple[int, int, int, str, str]


@dataclass
class Tally:
    """Counts of the events in a run that is killed and resumed."""

    kills: int = 0
    trainers: int = 0
    """Number of trainers that were killed while the job continued."""
    templates: int = 0
    """Number of templates that were killed while the job continued."""
    failed: int = 0
    """Number of evaluations that failed because their trainer was killed."""
    resumes: int = 0
    finished: int = 0
    """Number of evaluations that have ended, without interrupted ones."""
    repeated: int = 0
    lost: int = 0
    """Number of evaluations that were printed as ended, but are missing in the study."""
    readings: int = 0
    """Number of times that another process read the journal during the run."""


def read_repeatedly(journal: Path, stop: Event, readings: multiprocessing.Queue[int | str]) -> None:
    """Read a journal (file with a study) until `stop` is set, as other tools of Optuna do.

    Then put the number of readings, or an error message, into `readings`.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    count = 0
    try:
        while not stop.is_set():
            # The study may not exist yet.
            with suppress(KeyError) if count == 0 else nullcontext():
                if journal.exists():  # Opening it would create it.
                    load_trials(journal.parent)
                    count += 1
            time.sleep(0.02)
        readings.put(count)
    except Exception as error:
        readings.put(f"{type(error).__name__}: {error}")


def survive(
    mpi: Mpi,
    folder: Path,
    chance: random.Random,
    budget: int,
    most_kills: int,
    seconds_of_files: float = 0.0,
) -> Tally:
    """Kill a run and resume it, until it ends. Assert that no evaluation is lost.

    In most of the first `most_kills` sessions, a trainer or a template is killed, and then the job.
    Later sessions run to their end. Each operation on a file takes `seconds_of_files` longer.
    """
    run_dir, tally, reported = folder / "run", Tally(), Counter[Key]()
    run_dir.mkdir(parents=True)
    slow = slow_files(folder, seconds_of_files, str(ROOT)) if seconds_of_files else {}
    stop = multiprocessing.Event()
    readings: multiprocessing.Queue[int | str] = multiprocessing.Queue()
    reader = multiprocessing.Process(
        target=read_repeatedly, args=(run_dir / "study.log", stop, readings)
    )
    reader.start()
    try:
        for session in range(1, 100):
            status, killed, lines = _run_session(
                mpi, folder, chance, budget, session <= most_kills, slow, tally
            )
            reported += lines
            assert killed or status == 0
            if status == 0:
                break
            tally.kills += 1
            tally.resumes += 1
        assert status == 0, "the run does not end"
    finally:
        stop.set()
        tally.readings = _receive_count(readings)
        reader.join(10)
    trials = [
        trial for trial in load_trials(run_dir) if trial.user_attrs.get("failure") != "interrupted"
    ]
    ended = Counter(_make_trial_key(trial) for trial in trials)
    tally.finished, tally.repeated = (
        len(trials),
        sum("retry_of" in trial.user_attrs for trial in trials),
    )
    tally.lost = (reported - ended).total()
    assert reported, "no line of an evaluation was parsed"
    assert tally.lost == 0, f"printed, but not in the study: {reported - ended}"
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}
    assert len(trials) == budget
    failures = [trial.user_attrs["failure"] for trial in trials if trial.state.name == "FAIL"]
    others = [failure for failure in failures if not failure.endswith("ValueError: injected")]
    tally.failed = len(others)
    assert all("the trainer was ended by SIGKILL" in failure for failure in others), others
    assert tally.failed <= tally.trainers
    return tally


def _run_session(
    mpi: Mpi,
    folder: Path,
    chance: random.Random,
    budget: int,
    kill: bool,
    variables: Mapping[str, str],
    tally: Tally,
) -> tuple[int, bool, Counter[Key]]:
    ranks, ranks_per_worker, islands = chance.choice(LAYOUTS)
    log = folder / f"log-{time.monotonic_ns()}"
    layout = ["--ranks-per-worker", ranks_per_worker, "--islands", islands, "--evaluations", budget]
    # The job must be killed before it ends.
    seconds = scale(0.5) if kill else 0.1
    settings = [f"seconds={seconds}", "way=none,raise,none,none", "every=1"]
    command: list[object] = [
        PROGRAM,
        FAULTY,
        "--run-dir",
        folder / "run",
        "--resume",
        *layout,
        *(word for setting in settings for word in ("--set", setting)),
    ]
    victim = Victim(mpi, ranks, command, folder, log, variables)
    killed_parts, killed = list[str](), False
    began = not kill or chance.random() < 0.8  # Some jobs are killed before the first evaluation.
    if began and victim.wait_for(f"/{budget} "):  # start of the line of an evaluation
        victim.sleep(chance.uniform(0.0, 1.0))
        part = chance.choice(["trainer", "template"])
        killed_part = victim.kill(part, chance)
        if not killed_part.startswith(f"{part} (0"):
            setattr(tally, f"{part}s", getattr(tally, f"{part}s") + 1)
            killed_parts.append(killed_part)
    if kill:
        after, job_part = (
            chance.uniform(0.0, 1.5 if began else 4.0),
            chance.choice(["rank", "mpirun", "all"]),
        )
        victim.sleep(after)
        if victim.job.poll() is None:
            killed = True
            killed_parts.append(f"{victim.kill(job_part, chance)} after {after:.2f} s")
    status, errors = victim.wait(120)
    lines = Counter(_make_line_key(line) for line in parse_lines(log.read_text()))
    shown = ", ".join(killed_parts) or "nothing"
    print(
        f"    {ranks} ranks, killed: {shown}: status {status}, {lines.total()} evaluations printed",
        flush=True,
    )
    assert "Traceback" not in errors, errors
    assert "error:" not in errors, errors
    return status, killed, lines


def _receive_count(readings: multiprocessing.Queue[int | str]) -> int:
    result = readings.get(timeout=30)
    assert isinstance(result, int), f"the journal could not be read during writes: {result}"
    return result


def _make_line_key(line: dict[str, str]) -> Key:
    loss = line["loss"] if line["loss"] != "failed" else "FAIL"
    x = re.search(r"x=(\S+)", line["params"])
    return (
        int(line["island"]),
        int(line["worker"]),
        int(line["generation"]),
        loss,
        x.group(1) if x else "",
    )


def _make_trial_key(trial: optuna.trial.FrozenTrial) -> Key:
    attributes = trial.user_attrs
    loss = f"{trial.values[0]:.4g}" if trial.values else trial.state.name
    return (
        attributes["island"],
        attributes["worker"],
        attributes["generation"],
        loss,
        f"{trial.params['x']:.4g}",
    )


def measure_failure_recovery(
    mpi: Mpi, size: int, folder: Path, rounds: int = 2
) -> dict[str, float]:
    """Let evaluations fail in all ways on a worker of `size` ranks, and measure the recovery.

    Returns:
        The longest time in seconds from an exception to the start of the next evaluation on all
        ranks, by way to fail. It includes the first evaluation of the process.
    """
    folder.mkdir()
    ways = [way for way in WAYS if size > 1 or way not in FOR_SEVERAL_RANKS]
    arguments = [
        "--ranks-per-worker",
        size,
        "--islands",
        1,
        "--evaluations",
        rounds * len(ways) + 1,
    ]
    settings = [
        "--set",
        f"way={','.join(ways)}",
        "--set",
        f"folder={folder}",
        "--collective-timeout",
        60,
    ]
    job = mpi.run(
        size, PROGRAM, FAULTY, *arguments, *settings, "--run-dir", folder / "run", cwd=folder
    )
    assert "Traceback" not in job.stderr, job.stderr
    notes = [
        [json.loads(line) for line in (folder / f"0-{rank}").read_text().splitlines()]
        for rank in range(size)
    ]
    starts: dict[int, list[float]] = {}  # by evaluation, on the ranks on which it has begun
    for note in (note for of_rank in notes for note in of_rank if note["event"] == "starts"):
        starts.setdefault(note["number"], []).append(note["at"])
    worst: dict[str, float] = {}
    for number in range(rounds * len(ways)):
        way, next_start = ways[number % len(ways)], max(starts[number + 1])
        failed = [
            n["at"]
            for of_rank in notes
            for n in of_rank
            if n["event"] == "fails" and n["way"] == way
        ]
        raised = [at for at in failed if min(starts[number]) <= at <= next_start]
        if raised:  # Ranks that yield different losses raise no exception.
            worst[way] = max(worst.get(way, 0.0), next_start - min(raised))
    return worst


def measure_crash_recovery(mpi: Mpi, size: int, folder: Path) -> dict[str, float]:
    """Let the trainers of a worker crash in all ways, and measure the recovery.

    Returns:
        The longest time in seconds from a crash to the start of the next evaluation on all ranks,
        by way to crash.
    """
    folder.mkdir()
    options = [
        "--ranks-per-worker",
        size,
        "--evaluations",
        2 * len(CRASHES),
        "--collective-timeout",
        60,
    ]
    victim = Victim(
        mpi,
        size,
        make_dying_arguments(*options, ways=",".join(CRASHES), every=2),
        folder,
        folder / "log",
    )
    kill_on_request(victim)
    status, errors = victim.wait(200)
    assert status == 0, errors
    states = Counter(trial.state.name for trial in load_trials(folder / "run"))
    assert states == {"FAIL": len(CRASHES), "COMPLETE": len(CRASHES)}
    return crashes.measure_recovery_times(folder)


def measure_slowdown(mpi: Mpi, folder: Path) -> tuple[float, float, Counter[str]]:
    """Measure the time of 60 evaluations on 8 ranks, without failures and with a third.

    Returns:
        The seconds without failures, the seconds with failures, and the number of trials by state
        with failures.
    """
    folder.mkdir()
    seconds = []
    for name, way in (("well", "none"), ("ill", f"{','.join(WAYS)}")):
        start, run_dir = time.monotonic(), folder / name
        settings = [
            "--set",
            f"way={way}",
            "--set",
            "every=3",
            "--set",
            "seconds=0.2",
            "--evaluations",
            60,
        ]
        notes = folder / f"notes-{name}"
        notes.mkdir()
        job = mpi.run(
            8,
            PROGRAM,
            FAULTY,
            *settings,
            "--set",
            f"folder={notes}",
            "--run-dir",
            run_dir,
            cwd=folder,
        )
        seconds.append(time.monotonic() - start)
        assert job.returncode == 0, job.stderr
    summary = json.loads((folder / "ill" / "summary.json").read_text())
    states = Counter(trial.state.name for trial in load_trials(folder / "ill"))
    counts = summary["evaluations"]
    assert (counts["complete"], counts["failed"]) == (states["COMPLETE"], states["FAIL"])
    assert sum(entry["count"] for entry in summary["failures"]) == states["FAIL"]
    return seconds[0], seconds[1], states


def suspend_run(mpi: Mpi, folder: Path, chance: random.Random, stops: int) -> tuple[int, float]:
    """Suspend a run `stops` times for longer than its ranks wait, and assert its end.

    Returns:
        The number of evaluations, and the seconds for which the run was suspended.
    """
    folder.mkdir()
    ranks, ranks_per_worker, islands = chance.choice([(8, 2, 2), (6, 3, 1), (4, 4, 1)])
    layout = [
        "--ranks-per-worker",
        ranks_per_worker,
        "--islands",
        islands,
        "--collective-timeout",
        3,
    ]
    command = [
        PROGRAM,
        ENDLESS,
        "--run-dir",
        "run",
        *layout,
        "--evaluations",
        4 * ranks // ranks_per_worker,
    ]
    victim = Victim(mpi, ranks, command, folder, folder / "log")
    victim.wait_for("done  island")
    stopped = 0.0
    for _ in range(stops):
        victim.sleep(chance.uniform(0.5, 3.0))
        seconds = chance.uniform(4.0, 12.0)
        stopped += seconds if victim.suspend(seconds) else 0.0
    status, errors = victim.wait(120)
    assert (status, errors) == (0, ""), errors
    states = Counter(trial.state.name for trial in load_trials(folder / "run"))
    assert set(states) == {"COMPLETE"}, states
    return states.total(), stopped
