"""A search as a careless user writes it.

Its objective changes all arguments, prints, and makes mistakes.
"""

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpo import Float, Int, SearchSpace
from tests.searches.counting import count

space = SearchSpace(lr=Float(1e-4, 1.0, log=True), width=Int(8, 512))


@dataclass
class Settings:
    ways: str = "none"  # those of a worker's evaluations, in turn, divided by commas
    epochs: int = 2


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return self.layer(x)


def prepare(settings):
    settings.epochs = 99  # in the process that prepares the data
    return {
        "array": np.ones((100, 4), np.float32),
        "tensor": torch.ones(5, dtype=torch.bfloat16),
        "names": ["a"],
    }


def change(params, worker, settings):
    """Change all arguments, and check that no previous evaluation has changed them."""
    assert (settings.epochs, worker.seed, hasattr(worker, "mine"), worker.data["names"]) == (
        2,
        0,
        False,
        ["a"],
    )
    settings.epochs = worker.seed = worker.mine = 1
    os.chdir("/")
    worker.comm.barrier()
    worker.comm = worker.devices = None
    worker.data["names"].append("b")
    array, tensor = torch.from_numpy(worker.data["array"]), worker.data["tensor"]
    array.sub_(0.1)
    tensor.sub_(0.5)
    assert array.eq(torch.tensor(1.0) - 0.1).all()
    assert tensor.eq(0.5).all()
    lr = params.pop("lr")
    params["width"] //= 8
    return lr


def mistake(way, model, worker):
    """Make the mistake `way` before the first loss.

    If the result is not None, the objective yields it as a loss.
    """
    if way == "tuple":
        return 0.5, 0.9
    if way == "text":
        return 0.5, {"accuracy": 1, "note": "good"}
    if way == "model":
        worker.offer_weights(model)
    elif way == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (worker.size,)))
        worker.offer_weights(model.state_dict())
    elif way == "cuda":
        model.cuda()
    elif way == "path":
        Path("data/missing.bin").read_bytes()
    return None


def disagree(way, worker):
    """Call collectives that differ from those of the other ranks."""
    if way == "size":
        dist.all_reduce(torch.ones(3 + worker.rank))
    elif way == "type":
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if worker.rank else torch.float32))
    elif way == "number":
        for _ in range(1 + worker.rank):
            dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(2))
    elif way == "barrier" and worker.rank == 0:
        dist.barrier()
    elif way == "sleep" and worker.rank == 0:
        time.sleep(3600)


def say(worker):
    """Print from each rank, in all ways in which a process can print."""
    print(f"rank {worker.rank} says", "hello")
    print("and complains", file=sys.stderr)
    os.write(1, b"native code\n")
    subprocess.run(["echo", "a child"], check=True)
    for percent in range(0, 101, 10):
        print(f"\r{percent}%", end="")
    print()
    print(repr(sys.stdin.read()))  # which is empty, and does not wait
    logging.getLogger("mine").warning("be warned")
    talkative = logging.getLogger("talkative")  # as Lightning's
    talkative.setLevel(logging.INFO)
    talkative.info("nobody asked for this")
    print("without an end", end="")


def compiled(model):
    """Compile a trained model and train it.

    Return the difference between its outputs and those of the original model.
    """
    fast, inputs = torch.compile(model, backend="eager"), torch.ones(3, 4)
    difference = (fast(inputs) - model(inputs)).abs().max().item()
    optimizer = torch.optim.AdamW(model.parameters())
    fast(inputs).sum().backward()
    optimizer.step()
    return {
        "difference": difference,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def objective(params, worker, settings):
    ways = settings.ways.split(",")
    way = ways[count(params, worker, ".") % len(ways)]
    lr = change(params, worker, settings)
    model = Model(**params)
    if way == "say":
        say(worker)
    wrong = mistake(way, model, worker)
    if wrong is not None:
        yield wrong
    if way == "returned":
        return 0.5  # in a generator
    if way == "return" and worker.rank == 1:
        return
    disagree(way, worker)
    if way == "swallow":
        with suppress(RuntimeError):
            dist.barrier(None) if worker.rank else dist.all_reduce(torch.ones(8))
        yield lr
        return
    if way == "yield" and worker.rank == 0:
        yield lr, {"alone": 1}
    shared = DistributedDataParallel(model)
    shared(torch.ones(3, 4)).sum().backward()
    metrics = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    yield lr, metrics | (compiled(model) if way == "compile" else {})
    if way == "late" and worker.rank == 1:
        dist.all_reduce(torch.ones(9))
