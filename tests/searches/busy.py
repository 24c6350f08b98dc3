"""A search in which evaluations on the first worker keep a CPU core busy. The loss is x."""

import time
from dataclasses import dataclass

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    way: str = "python"
    seconds: float = 4.0


def objective(params, worker, settings):
    if worker.index == 0:
        end = time.monotonic() + settings.seconds
        while time.monotonic() < end:
            if settings.way == "native":  # it keeps Python's lock for some hundredths of a second
                sum(range(1_000_000))
    else:
        time.sleep(0.05)
    print(f"x is {params['x']}")
    yield params["x"]
