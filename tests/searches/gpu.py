"""A search on GPUs. Some evaluations break their CUDA context, use up the memory, or are killed during a kernel."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 99))


@dataclass(frozen=True)
class Settings:
    folder: str = ""
    ways: str = "none"  # those of the evaluations, by k, divided by commas


def break_down(way, device):
    """Fail in the way `way`, as networks do on GPUs."""
    if way == "assert":  # a label that is out of range
        torch.nn.functional.cross_entropy(torch.zeros(4, 3, device=device), torch.full((4,), 99, device=device))
        torch.cuda.synchronize()
    elif way == "address":
        index = torch.full((1 << 20,), 1 << 40, device=device)
        torch.zeros(4, device=device).index_select(0, index)
        torch.cuda.synchronize()
    elif way == "memory":
        held = []
        while True:
            held.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
    elif way == "kill":
        torch.cuda._sleep(10**11)  # cycles, in a kernel
        os.kill(os.getpid(), 9)


def objective(params, worker, settings):
    free, total = torch.cuda.mem_get_info(worker.device)
    way = settings.ways.split(",")[params["k"]]
    seen = {"at": time.time(), "way": way, "free": free, "total": total, "backend": dist.get_backend()}
    seen |= {"device": str(worker.device), "uuid": str(torch.cuda.get_device_properties(worker.device).uuid)}
    seen |= {"local": int(os.environ["LOCAL_RANK"])}
    Path(settings.folder, f"{params['k']}-{worker.index}-{worker.rank}.json").write_text(json.dumps(seen))
    model = DistributedDataParallel(torch.nn.Linear(256, 256).to(worker.device))
    held = torch.zeros(1 << 28, device=worker.device)  # 1 GiB
    for epoch in range(2):
        loss = model(torch.ones(8, 256, device=worker.device)).sum()
        loss.backward()
        if epoch == 1 and worker.rank == worker.size - 1:
            break_down(way, worker.device)
        total_loss = torch.ones(1, device=worker.device)
        dist.all_reduce(total_loss)
        yield total_loss.item() + held[0].item()
