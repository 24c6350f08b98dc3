"""Run `hpo check` in MPI jobs, and read what it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.launch import HPO, SEARCHES, Mpi

MISTAKEN = SEARCHES / "mistaken.py"


def check_search(
    mpi: Mpi, ranks: int, folder: Path, search: object, *settings: str, patience: int = 30
) -> tuple[int, str]:
    """Check a search file in a job.

    Return the exit status and the output, in which each point is one line.
    """
    options = [word for setting in settings for word in ("--set", setting)]
    job = mpi.run(
        ranks, *HPO, "check", search, *options, "--collective-timeout", patience, cwd=folder
    )
    return job.returncode, join_points(job.stdout)


def join_points(printed: str) -> str:
    """Return the output of a check with the lines of each point joined."""
    return re.sub(r"\n {7}(?=\S)", " ", printed)


def check_ways(
    mpi: Mpi, folder: Path, ways: Sequence[str], search: Path = MISTAKEN
) -> list[tuple[int, str]]:
    """Check a search file on 2 ranks with each way to make a mistake.

    Return a status and an output for each way. A way may end with further settings, divided by
    commas.
    """
    settings = [f"way={way}".split(",") for way in ways]
    return [check_search(mpi, 2, folder, search, *words, patience=5) for words in settings]
