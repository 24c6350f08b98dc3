"""A search with population based training in which all individuals are almost equal.

So an individual and its parent are together like one long training.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hpo import Float, SearchSpace
from hpo.training import ParallelSettings, decay_weights
from tests.searches.shared_training import SharedTraining

space = SearchSpace(lr=Float(0.01, 0.0100001, mutable=True))


@dataclass(frozen=True)
class Settings(ParallelSettings):
    epochs: int = 2


class Part:
    def __init__(self, count, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 3, (count,), generator=drawn)
        self.inputs = torch.randn(count, 8, generator=drawn) + self.targets.view(-1, 1)

    def __len__(self):
        return len(self.targets)

    def get_batch(self, indices):
        return self.inputs[indices], self.targets[indices]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs):
        return inputs + self.dropout(torch.tanh(self.linear(inputs)))


def objective(params, worker, settings):
    network = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    data = Part(72, 0), Part(32, 1)

    def make_optimizer(model):
        return torch.optim.AdamW(decay_weights(model, 0.01), lr=params["lr"])

    return SharedTraining(network, data, worker, settings, make_optimizer, 16).fit(settings.epochs)
