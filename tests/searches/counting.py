"""Count evaluations and write notes of ranks, in files.

Variables would be lost if a trainer is replaced.
"""

import fcntl
import json
import time
from pathlib import Path


def count(params, worker, folder):
    """Return the number of this evaluation on its worker, from 0. All ranks get the same number."""
    with Path(folder, f"{worker.index}-numbers").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known, this = file.read().splitlines(), json.dumps(params)
        if this not in known:
            file.write(f"{this}\n")
        return [*known, this].index(this)


def note(folder, worker, **event):
    """Append an event and its time to the file of this rank."""
    with Path(folder, f"{worker.index}-{worker.rank}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"at": time.time(), **event}) + "\n")
