"""Numbers of evaluations and notes of ranks, in files: a trainer that is forked again has lost its variables."""

import fcntl
import json
import time
from pathlib import Path


def count(params, worker, folder):
    """Return the number of this evaluation on its worker, from 0; its first rank that asks counts it."""
    with Path(folder, f"{worker.index}-numbers").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known, this = file.read().splitlines(), json.dumps(params)
        if this not in known:
            file.write(f"{this}\n")
        return [*known, this].index(this)


def note(folder, worker, **event):
    """Append an event of this rank, with the time, to its file."""
    with Path(folder, f"{worker.index}-{worker.rank}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"at": time.time(), **event}) + "\n")
