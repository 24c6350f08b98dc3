"""A search in which the leader of the first worker waits until a file exists.

All other ranks have nothing to do.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    until: str = "go"  # a file


def objective(params, worker, settings):
    while worker.index == worker.rank == 0 and not Path(settings.until).exists():
        time.sleep(0.1)
    return params["x"]
