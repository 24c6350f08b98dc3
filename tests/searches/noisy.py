"""A search whose losses depend on the seed. The setting `noise` selects how much."""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    noise: float = 1.0
    seconds: float = 0.0
    permits: str = ""  # A folder. Each evaluation waits for a file in it, and removes this file.


def objective(params, worker, settings):
    assert torch.initial_seed() == worker.seed
    time.sleep(settings.seconds)
    if settings.permits:
        if worker.rank == 0:
            take_permit(Path(settings.permits))
        worker.comm.barrier()
    return params["x"] + settings.noise * torch.rand(1).item()


def take_permit(folder):
    while True:
        for permit in folder.iterdir():
            with suppress(FileNotFoundError):  # Another worker has taken it.
                permit.unlink()
                return
        time.sleep(0.02)
