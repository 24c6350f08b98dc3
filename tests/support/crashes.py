"""Run tests/searches/dying.py, whose trainers crash or hang, and read its notes.

The times of starts and crashes are noted in a file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.chaos import Victim, kill_at_end
from tests.support.launch import PROGRAM, SEARCHES, Mpi


@dataclass
class NotedEvaluation:
    """An evaluation as its ranks have noted it: the times of its starts and crashes.

    `x` is its hyperparameter. `way` is the way in which it crashes, or "". `rank` is the rank that
    crashes.
    """

    x: float
    way: str
    rank: int
    starts: dict[int, list[float]] = field(default_factory=dict)
    crashes: list[float] = field(default_factory=list)


def make_dying_arguments(*options: object, **settings: object) -> list[object]:
    """Return the arguments of a run with dying.py.

    Its trainers write notes to the current directory.
    """
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    return [PROGRAM, SEARCHES / "dying.py", "--run-dir", "run", "--islands", 1, *options, *chosen]


def read_notes(folder: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the worker, the rank and the content of each note in a folder."""
    for path in folder.glob("[0-9]-[0-9]"):
        worker, rank = map(int, path.name.split("-"))
        for line in path.read_text().splitlines():
            yield worker, rank, json.loads(line)


def list_noted(folder: Path) -> list[NotedEvaluation]:
    """Return the evaluations of all workers from the notes in a folder."""
    return [
        evaluation
        for of_worker in group_noted_by_worker(folder).values()
        for evaluation in of_worker
    ]


def group_noted_by_worker(folder: Path) -> Mapping[int, Sequence[NotedEvaluation]]:
    """Return the noted evaluations of each worker, in the order of their starts."""
    found: dict[int, dict[float, NotedEvaluation]] = {}
    for worker, rank, note in sorted(read_notes(folder), key=lambda item: float(item[2]["at"])):
        evaluation = found.setdefault(worker, {}).setdefault(
            note["x"], NotedEvaluation(note["x"], note["way"], note["rank"])
        )
        if note["event"] == "starts":
            evaluation.starts.setdefault(rank, []).append(note["at"])
        else:
            evaluation.crashes.append(note["at"])
    return {worker: list(evaluations.values()) for worker, evaluations in found.items()}


def measure_recovery_times(folder: Path) -> dict[str, float]:
    """Return the longest recovery in seconds after each way to crash.

    A recovery lasts from the crash to the start of the worker's next evaluation on all its ranks.
    """
    times: dict[str, float] = {}
    for evaluations in group_noted_by_worker(folder).values():
        for crashed, following in pairwise(evaluations):
            if crashed.way:
                seconds = max(starts[0] for starts in following.starts.values()) - min(
                    crashed.crashes
                )
                times[crashed.way] = max(seconds, times.get(crashed.way, 0.0))
    return times


def find_shared_memory(victim: Victim) -> set[tuple[str, int]]:
    """Return names and inodes of files in shared memory that a job has mapped."""
    found = set[tuple[str, int]]()
    for process in victim.find_processes():
        with suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                *_, inode, path = [*line.split(maxsplit=5), ""][:6]
                if path.startswith("/dev/shm/"):
                    found.add((path.removesuffix(" (deleted)"), int(inode)))
    return found


@contextmanager
def start_job(mpi: Mpi, ranks: int, folder: Path, arguments: list[object]) -> Iterator[Victim]:
    """Start a job with a temporary folder, and kill its remaining processes at the end.

    At the end, assert that neither temporary files nor files in shared memory are left.
    """
    temporary, shared = folder / "temporary", set[tuple[str, int]]()
    temporary.mkdir()

    def watch_shared_memory() -> None:
        while victim.job.poll() is None:
            shared.update(find_shared_memory(victim))
            time.sleep(0.3)

    with kill_at_end(
        Victim(mpi, ranks, arguments, folder, folder / "log", {"TMPDIR": str(temporary)})
    ) as victim:
        watching = threading.Thread(target=watch_shared_memory, daemon=True)
        watching.start()
        yield victim
        watching.join(10)
    # torch creates the folder of its compiler's cache when it is imported, and keeps it.
    assert [
        path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")
    ] == []
    assert [
        path for path, inode in shared if Path(path).exists() and Path(path).stat().st_ino == inode
    ] == []


def kill_on_request(victim: Victim) -> threading.Thread:
    """Start a thread that kills trainers that wait for it (way "outside")."""

    def kill() -> None:
        killed = set[int]()
        while victim.job.poll() is None:
            wanted = {
                note["process"]
                for _, _, note in read_notes(victim.folder)
                if (note["event"], note["way"]) == ("crashes", "outside")
            }
            for process in wanted - killed:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            killed |= wanted
            time.sleep(0.05)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread
