"""A search whose evaluations sleep for `seconds` per epoch, and check what they get."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpo import Categorical, Float, Int, SearchSpace

space = SearchSpace(
    depth=Int(1, 9),
    act=Categorical("relu", "tanh"),
    flag=Categorical(True, False),
    lr=Float(1e-4, 1.0, log=True),
)


@dataclass(frozen=True)
class Settings:
    seconds: float = 0.0
    epochs: int = 2


def objective(params, worker, settings):
    total = torch.tensor([1.0, worker.comm.rank])
    dist.all_reduce(total)
    assert total.tolist() == [worker.size, sum(range(worker.size))]
    assert worker.comm.size == worker.size == dist.get_world_size()
    assert [type(value) for value in params.values()] == [int, str, bool, float]
    for epoch in range(settings.epochs):
        time.sleep(settings.seconds)
        yield params["depth"] + params["lr"] + 1 / (epoch + 1)
