"""A search of which two thirds fail: on one rank while the others wait for its gradients, or on all."""

import torch
from torch.nn.parallel import DistributedDataParallel

from hpo import Int, SearchSpace

space = SearchSpace(way=Int(0, 8))


def objective(params, worker):
    yield 2.0
    way = params["way"] % 3
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    loss = model(torch.ones(2, 3)).sum()
    if way == 0 and worker.rank == worker.size - 1:
        raise ValueError(f"way {params['way']}\nis closed")
    loss.backward()
    yield float("nan") if way == 1 else 1.0
