"""A search whose losses depend on the seed. The setting `noise` selects how much."""

import time
from dataclasses import dataclass

import torch

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    noise: float = 1.0
    seconds: float = 0.0


def objective(params, worker, settings):
    assert torch.initial_seed() == worker.seed
    time.sleep(settings.seconds)
    return params["x"] + settings.noise * torch.rand(1).item()
