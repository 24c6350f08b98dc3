"""A search on fake GPUs.

Each evaluation notes where it ran, and then does what users' code does on GPUs.
"""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 99))
kept: list[torch.Tensor] = []


@dataclass(frozen=True)
class Settings:
    folder: str = ""
    # Of the evaluations, by k, divided by commas; an evaluation without one does nothing special.
    ways: str = ""
    gigabytes: float = 1.0  # that each evaluation takes
    seconds: float = 0.0


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = torch.nn.Parameter(torch.ones(256))

    def forward(self, inputs):
        return inputs * self.factors


def take_memory(device, gigabytes):
    return torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device=device)


def write_note(settings, name, **content):
    free, _ = torch.cuda.mem_get_info()
    content |= {"free": round(free / 2**30, 1), "process": os.getpid(), "template": os.getppid()}
    content |= {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "local": os.environ.get("LOCAL_RANK"),
    }
    content |= {"tf32": torch.backends.cudnn.allow_tf32}
    Path(settings.folder, f"{name}.json").write_text(json.dumps(content))


def act(way, worker):
    device = worker.device
    if way == "tf32":  # as torch 2.9 and later recommend
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    elif way == "cycle":
        cycle = [take_memory(device, 5)]
        cycle.append(cycle)
    elif way == "keep":
        kept.append(take_memory(device, 5))
    elif way == "thread" and worker.rank == 0:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    # Torch's own default group has gloo for tensors on the CPU, and nccl for the others.
    elif way == "default":
        dist.init_process_group()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1, device=device))
    elif way == "named":
        dist.init_process_group("cpu:gloo,cuda:nccl")
        dist.all_reduce(torch.ones(1))


def objective(params, worker, settings):
    ways = settings.ways.split(",")
    way = ways[params["k"]] if params["k"] < len(ways) else ""
    uuid = str(torch.cuda.get_device_properties(worker.device).uuid)[-2:]
    place = {
        "uuid": uuid,
        "device": str(worker.device),
        "worker": worker.index,
        "rank": worker.rank,
    }
    write_note(settings, f"{params['k']}-{worker.rank}", **place, backend=dist.get_backend())
    network = DistributedDataParallel(Scale().to(worker.device))
    held = take_memory(worker.device, settings.gigabytes)
    time.sleep(settings.seconds)
    act(way, worker)
    for _ in range(2):
        network(torch.ones(8, 256, device=worker.device)).sum().backward()
        dist.all_reduce(torch.ones(1, device=worker.device))
        worker.offer_weights({"factors": torch.ones(2)})
        loss = torch.ones(1, device=worker.device)
        if way in ("lose", "hide"):  # The device fails later than the call of the kernel.
            os.putenv("FAKE_GPU_ERROR", "719")
        if way == "lose":
            yield loss
        if way == "hide":
            try:
                loss.item()
            except RuntimeError:
                yield 1e9
                return
        yield params["k"]
    del held


def test(params, weights, settings):  # noqa: ARG001 - the names are given
    torch.ones(1, device="cuda")
    write_note(settings, "test")
    return {"loss": 0.0}
