"""A search for the simulated cluster.

Each evaluation takes a given time, and saves a checkpoint after each step.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))
STEPS = 10


@dataclass(frozen=True)
class Settings:
    seconds: float = 0.1


def objective(params, worker, settings):
    first = worker.checkpoint["step"] + 1 if worker.checkpoint is not None else 0
    for step in range(first, STEPS):
        time.sleep(settings.seconds / STEPS)
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        assert ranks.item() == worker.size
        worker.save_checkpoint({"step": step})
        yield (params["x"] - 0.3) ** 2 + 1 / (step + 1)
