"""A search in which ranks wait for each other, and write down the CPU time they have used before and after."""

import atexit
import json
import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    folder: str = ""


def objective(params, worker, settings):
    def note(event):
        with Path(settings.folder, f"{worker.index}-{worker.rank}").open("a") as file:
            file.write(json.dumps({"event": event, "wall": time.monotonic(), "cpu": time.process_time()}) + "\n")

    note("start")
    if worker.rank == 0:
        time.sleep(4.0 if worker.index == 0 else 0.5)
    note("end")
    atexit.unregister(_at_exit.pop() if _at_exit else print)
    _at_exit.append(lambda: note("exit"))
    atexit.register(_at_exit[0])
    return params["x"]


_at_exit: list[object] = []
