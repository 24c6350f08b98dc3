"""A search whose ranks share a network by `hpo.training`.

One rank fails at a chosen moment of the training. `fails` lists ways to fail. With
"sleep@backward1:2", rank 2 sleeps in the backward pass of epoch 1. The ways are taken in turn, with
successful evaluations in between. All evaluations train the same network, so their losses are
equal, except for `slope` times the number of the evaluation. With a slope of -1, each evaluation is
the best so far, and its weights are gathered. Each rank records its state when it starts and when
it fails.
"""

import os
import re
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hpo import Float, SearchSpace
from hpo.training import ParallelSettings
from tests.searches.counting import count
from tests.searches.counting import note as append_note
from tests.searches.shared_training import SharedTraining

space = SearchSpace(x=Float(0.0, 1.0))
networks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
kept: list[object] = []


@dataclass(frozen=True)
class Settings(ParallelSettings):
    fails: str = "none"
    every: int = 2  # which evaluations fail: 2 every second, beginning with the first
    slope: float = -1.0
    epochs: int = 2
    waits_after: int = 0  # losses, until the run is stopped
    folder: str = ""


RAISED = {"memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt}


class Trap:
    """Makes a rank fail when the training reaches the position `place`."""

    def __init__(self):
        self.kind = self.place = ""
        self.tell = lambda: None

    def spring(self, place):
        if place != self.place:
            return
        self.tell()
        if self.kind == "sleep":
            time.sleep(3600)
        raise RAISED.get(self.kind, ValueError)(f"injected: {self.kind} in {place}")


trap = Trap()


class Through(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        trap.spring("backward")
        return gradient.clone()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs):
        trap.spring("forward" if self.training else "validation")
        return Through.apply(inputs + self.dropout(torch.tanh(self.norm(self.linear(inputs)))))

    def _save_to_state_dict(self, *arguments):
        trap.spring("gather")
        super()._save_to_state_dict(*arguments)


class Part:
    """Samples of three classes.

    No number of ranks divides a batch equally, and the last batch is smaller.
    """

    def __init__(self, count, seed, place):
        drawn = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 3, (count,), generator=drawn)
        self.inputs = torch.randn(count, 8, generator=drawn) + self.targets.view(-1, 1)
        self.place = place

    def __len__(self):
        return len(self.targets)

    def get_batch(self, indices):
        trap.spring(self.place)
        return self.inputs[indices], self.targets[indices]


def network_of():
    return nn.Sequential(*(Block(8) for _ in range(4)), nn.Linear(8, 3))


def share_of_memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def note(settings, worker, **event):
    if settings.folder:
        append_note(settings.folder, worker, **event)


def objective(params, worker, settings):
    number = count(params, worker, settings.folder or ".")
    turn, due = divmod(number, settings.every)
    ways = settings.fails.split(",")
    way = ways[turn % len(ways)] if due == 0 else "none"
    note(
        settings,
        worker,
        event="starts",
        number=number,
        process=os.getpid(),
        way=way,
        descriptors=len(os.listdir("/dev/fd")),  # noqa: PTH208
        threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208
        memory=share_of_memory(),
        networks=len(networks),
    )
    kind, place, epoch, rank = (re.findall(r"(\w+)@([a-z ]+)(\d):(\d)", way) or [("",) * 4])[0]
    trap.kind, trap.place, trap.tell = (
        kind,
        "",
        lambda: note(settings, worker, event="fails", number=number),
    )
    network = network_of()
    networks.add(network)
    if kind == "keep":
        kept.append(network)
    data = Part(72, 0, "data"), Part(31, 1, "validation data")
    training = SharedTraining(network, data, worker, settings, make_optimizer, 17)
    del network
    losses = training.fit(settings.epochs)
    for done in range(settings.epochs):
        if str(worker.rank) == rank and done == int(epoch):
            trap.place = place
        if (trained := next(losses, None)) is None:
            return  # It has resumed.
        loss, metrics = trained
        yield loss + settings.slope * number, metrics
        if done + 1 == settings.waits_after:
            time.sleep(3600)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
