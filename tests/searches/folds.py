"""A search whose evaluations train two networks, one after another, each on its own half of the samples.

Individuals that differ only in `copy` have the same losses.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from hpo import Float, Int, SearchSpace
from hpo.training import Recipe, fit

space = SearchSpace(lr=Float(0.001, 0.1), copy=Int(1, 2))


@dataclass(frozen=True)
class Settings:
    epochs: int = 3
    seconds: float = 0.0  # that an epoch takes


class Half:
    def __init__(self, number, count):
        drawn = torch.Generator().manual_seed(number)
        self.targets = torch.randint(0, 3, (count,), generator=drawn)
        self.inputs = torch.randn(count, 8, generator=drawn) + self.targets.view(-1, 1)

    def __len__(self):
        return len(self.targets)

    def get_batch(self, indices):
        return self.inputs[indices], self.targets[indices]


class Fold:
    def __init__(self, number):
        self.number = number

    def splits(self, _):
        return Half(self.number, 64), Half(self.number + 10, 32)


def objective(params, worker, settings):
    for number in range(2):
        torch.manual_seed(number)
        network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        for loss, metrics in fit(network, Fold(number), worker, Recipe(settings.epochs, 16, params["lr"], "adamw")):
            time.sleep(settings.seconds)
            yield loss, metrics
