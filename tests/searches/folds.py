"""A search whose evaluations train two networks in turn, each on half of the samples.

Individuals that differ only in `copy` have the same losses.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpo import Float, Int, SearchSpace

space = SearchSpace(lr=Float(0.001, 0.1), copy=Int(1, 2))


@dataclass(frozen=True)
class Settings:
    epochs: int = 3
    waits_after: int = 0  # losses, until the run is stopped


class Half:
    def __init__(self, number, count):
        drawn = torch.Generator().manual_seed(number)
        self.targets = torch.randint(0, 3, (count,), generator=drawn)
        self.inputs = torch.randn(count, 8, generator=drawn) + self.targets.view(-1, 1)


def objective(params, worker, settings):
    for number in range(2):
        torch.manual_seed(number)
        network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        model = nn.parallel.DistributedDataParallel(network)
        optimizer = torch.optim.AdamW(network.parameters(), lr=params["lr"])
        first = 0
        if number == 0 and (state := worker.checkpoint):
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"] + 1
        for epoch in range(first, settings.epochs):
            loss = train_epoch(model, optimizer, Half(number, 64), Half(number + 10, 32), worker)
            worker.offer_weights(network.state_dict())
            if number == 0:
                state = {
                    "network": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                }
                worker.save_checkpoint(state)
            yield loss
            if number * settings.epochs + epoch + 1 == settings.waits_after:
                time.sleep(3600)


def train_epoch(model, optimizer, train, validation, worker):
    for batch in torch.arange(64).split(16):
        mine = batch[worker.rank :: worker.size]
        optimizer.zero_grad()
        cross_entropy(model(train.inputs[mine]), train.targets[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(model.module(validation.inputs), validation.targets).item()
