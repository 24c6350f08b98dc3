"""A search whose evaluations take half a second; those after the first eight wait for a file."""

import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Float, Int, SearchSpace

space = SearchSpace(depth=Int(1, 9), lr=Float(1e-4, 1.0, log=True))


@dataclass(frozen=True)
class Settings:
    gate: str = "gate"


def objective(params, worker, settings):
    while worker.trial >= 8 and not Path(settings.gate).exists():
        time.sleep(0.05)
    for epoch in range(2):
        time.sleep(0.25)
        yield params["depth"] + params["lr"] + 1 / (epoch + 1)
