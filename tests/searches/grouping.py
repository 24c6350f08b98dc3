"""A search whose objective makes process groups, and fails in one of several ways while its peers wait in them.

Evaluations take the ways in turn, and go well in between. Each says how many descriptors and threads it has found.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))
WAYS = ["making", "group", "mesh", "late making", "late group", "comm", "copy"]
count = {"evaluations": 0}


def objective(params, worker):
    number = count["evaluations"]
    count["evaluations"] += 1
    turn, fails = divmod(number, 2)
    way = WAYS[turn % len(WAYS)] if fails else "none"
    descriptors, threads = len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208
    print(f"{number} {way}: {descriptors} descriptors, {threads} threads")
    last = worker.rank == worker.size - 1
    tell_apart(way, "making", last)
    group = dist.new_group(list(range(worker.size)))
    mesh = init_device_mesh("cpu", (worker.size // 2, 2), mesh_dim_names=("rows", "columns"))
    tell_apart(way, "group", last)
    value = torch.ones(2)
    dist.all_reduce(value, group=group)  # type: ignore[arg-type]
    tell_apart(way, "mesh", last)
    for name in ("rows", "columns"):
        dist.all_reduce(value, group=mesh.get_group(name))
    if way == "comm" and last:
        worker.comm.recv(source=0)
    worker.comm.barrier()
    if way == "copy" and last:
        worker.comm.Dup().recv(source=0)
    worker.comm.Dup().barrier()
    yield params["x"]


def tell_apart(way, place, last):
    """Let the last rank fail at a place, or be late there."""
    if last and way == place:
        raise ValueError(f"injected: {way}")
    if last and way == f"late {place}":
        time.sleep(3600)
