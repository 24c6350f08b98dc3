"""A search whose evaluations yield a loss.

Then they wait until a file exists, and yield another loss.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Categorical, Float, Int, SearchSpace

space = SearchSpace(
    layers=Int(1, 9),
    width=Int(16, 1024),
    act=Categorical("relu", "tanh"),
    bias=Categorical(True, False),
    momentum=Float(0.0, 1.0),
    lr=Float(1e-4, 1.0, log=True),
)


@dataclass(frozen=True)
class Settings:
    file: str = ""


def objective(params, worker, settings):
    yield params["layers"] + 1.0
    deadline = time.monotonic() + 120
    while not Path(settings.file).exists():
        assert time.monotonic() < deadline, f"waited in vain on rank {worker.rank}"
        time.sleep(0.05)
    yield params["layers"] + params["lr"], {"accuracy": params["momentum"]}
