"""A search whose ranks call collectives repeatedly, for `seconds`."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    seconds: float = 2.0
    epochs: int = 4


def objective(params, worker, settings):
    value = torch.ones(4)
    for epoch in range(settings.epochs):
        for _ in range(int(settings.seconds / settings.epochs / 0.02)):
            time.sleep(0.02 if worker.rank == 0 else 0.0)
            dist.all_reduce(value)
        yield params["x"] + 1 / (epoch + 1)
