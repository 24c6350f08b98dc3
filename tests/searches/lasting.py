"""A search whose evaluations leave compiled code and a process group in torch."""

import threading

import torch
import torch.distributed as dist

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(1, 64))


def objective(params, worker):
    # A default argument of its functions is the group that is up.
    import torch.distributed.nn as functional

    size = params["k"]
    model = torch.nn.Linear(3, size)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    total = functional.all_reduce(compiled(torch.ones(2, 3)).sum() * 0 + worker.rank + 1)
    assert total.item() == sum(range(1, dist.get_world_size() + 1))
    if size == 50:
        raise ValueError("no")
    if size == 51 and worker.rank == 1:
        # This rank's trainer is replaced.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    yield float(size)
