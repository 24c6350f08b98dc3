"""Run tests/searches/sharing.py, whose ranks train one network, and read its notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.launch import PROGRAM, SEARCHES, Mpi

SHARING = SEARCHES / "sharing.py"
# In each way, the parts of a batch have the same samples, so that batch normalisation has the same
# statistics.
WAYS = {"replicate": "accumulate=2", "shard": "accumulate=2", "pipeline": "microbatches=2"}
# For each failure, the rank that fails in a worker of 2 ranks and in a worker of 3 ranks. The
# middle stage of a pipeline reads no data.
FAILURES = {
    "raise@forward0": (1, 1),
    "memory@forward1": (0, 0),
    "raise@backward0": (0, 2),
    "interrupt@backward1": (1, 1),
    "raise@data1": (0, 2),
    "raise@validation0": (1, 0),
    "raise@gather1": (1, 1),
    "keep@forward1": (0, 2),
}


def make_sharing_arguments(way: str, *options: object, **settings: object) -> list[object]:
    """Return the arguments of a run with sharing.py.

    `way` is "replicate", "shard" or "pipeline".
    """
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    start = [PROGRAM, SHARING, "--run-dir", "run", "--islands", 1, *options]
    return [*start, "--set", f"parallel={way}", "--set", WAYS[way], *chosen]


def read_rank_notes(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the notes that a rank of the only worker has written to a folder."""
    return [json.loads(line) for line in (folder / f"0-{rank}").read_text().splitlines()]


def measure_seconds_lost(folder: Path, size: int, count: int) -> list[float]:
    """Return the seconds from each failure until the next evaluation has started on all ranks."""
    notes = [note for rank in range(size) for note in read_rank_notes(folder, rank)]
    failed = {note["number"]: note["at"] for note in notes if note["event"] == "fails"}
    started: dict[int, float] = {}
    for note in notes:
        if note["event"] == "starts":
            started[note["number"]] = max(note["at"], started.get(note["number"], 0.0))
    return [started[2 * number + 1] - failed[2 * number] for number in range(count)]


def measure_worst_recovery(mpi: Mpi, way: str, size: int, folder: Path) -> float:
    """Let a shared network fail in all parts, and return the longest recovery in seconds."""
    folder.mkdir()
    fails = ",".join(f"{what}:{ranks[size - 2]}" for what, ranks in FAILURES.items())
    options = [
        "--ranks-per-worker",
        size,
        "--evaluations",
        2 * len(FAILURES),
        "--collective-timeout",
        60,
    ]
    job = mpi.run(
        size, *make_sharing_arguments(way, *options, fails=fails, folder=folder), cwd=folder
    )
    assert (job.returncode, job.stderr) == (0, "")
    return max(measure_seconds_lost(folder, size, len(FAILURES)))
