"""A search on GPUs.

Each evaluation notes what it finds, and some do what breaks a context, a group or a process.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 99))
KERNEL = 'extern "C" __global__ void write_far(float* values) { values[1ull << 40] = 1; }'


@dataclass(frozen=True)
class Settings:
    folder: str = ""
    ways: str = (
        # Of the evaluations, by k, divided by commas; an evaluation without one trains, and does
        # nothing else.
        ""
    )
    share: float = (
        # Of the memory that is free at the first evaluation, for evaluations with an odd k; others
        # take 1 GiB.
        0.5
    )


def break_down(way, device):
    """Fail in the way `way`, as networks do on GPUs."""
    if way in ("assert", "hide"):  # a label that is out of range
        torch.nn.functional.cross_entropy(
            torch.zeros(4, 3, device=device), torch.full((4,), 99, device=device)
        )
        torch.cuda.synchronize()
    elif way == "address":
        write_far = torch.cuda._compile_kernel(KERNEL, "write_far")
        write_far((1, 1, 1), (1, 1, 1), (torch.zeros(1, device=device),))
        torch.cuda.synchronize()
    elif way == "memory":
        held = []
        while True:
            held.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
    elif way == "kill":
        torch.cuda._sleep(10**11)  # cycles, in a kernel
        os.kill(os.getpid(), 9)
    elif way == "hang":
        time.sleep(1000)


def use_torch(way, device):
    """Train with a feature of torch."""
    if way == "amp":
        with torch.autocast("cuda", torch.bfloat16):
            torch.nn.Linear(512, 512, device=device)(
                torch.ones(512, 512, device=device)
            ).sum().backward()
    elif way == "compile":
        torch.compile(torch.nn.Linear(64, 64, device=device))(
            torch.ones(64, 64, device=device)
        ).sum().backward()
    elif way == "fsdp":
        model = torch.nn.Linear(256, 256, device=device)
        fully_shard(model)
        model(torch.ones(8, 256, device=device)).sum().backward()
    elif way == "loader":
        data = torch.utils.data.TensorDataset(torch.ones(256, 16))
        for (batch,) in torch.utils.data.DataLoader(data, 32, num_workers=2, pin_memory=True):
            batch.to(device, non_blocking=True).sum().item()


def objective(params, worker, settings):
    free, total = torch.cuda.mem_get_info(worker.device)
    k = params["k"]
    ways = settings.ways.split(",")
    way = ways[k] if k < len(ways) else ""
    note = {"at": time.time(), "way": way, "free": free, "total": total, "process": os.getpid()}
    note |= {"template": os.getppid(), "backend": dist.get_backend(), "device": str(worker.device)}
    note |= {"uuid": str(torch.cuda.get_device_properties(worker.device).uuid), "sum": None}
    file = Path(settings.folder, f"{k}-{worker.index}-{worker.rank}.json")
    file.write_text(json.dumps(note))
    network = DistributedDataParallel(torch.nn.Linear(256, 256).to(worker.device))
    size = int(free * settings.share) if k % 2 else 1 << 30
    held = torch.empty(size, dtype=torch.uint8, device=worker.device)
    network(torch.ones(8, 256, device=worker.device)).sum().backward()
    yield 2.0
    use_torch(way, worker.device)
    if worker.rank == worker.size - 1:
        try:
            break_down(way, worker.device)
        except RuntimeError:
            if way != "hide":  # A usual habit: what fails counts as a high loss.
                raise
    if way == "hide":
        yield 1e9
        return
    ranks = torch.full((1,), float(worker.rank + 1), device=worker.device)
    dist.all_reduce(ranks)
    file.write_text(json.dumps({**note, "sum": ranks.item()}))
    yield 1.0
    del held
