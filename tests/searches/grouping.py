"""A search whose objective makes process groups.

In every second evaluation, the last rank fails while its peers wait. The ways to fail are taken in
turn. Each evaluation prints the id of its process.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpo import Float, SearchSpace
from tests.searches.counting import count

space = SearchSpace(x=Float(0.0, 1.0))
WAYS = ["making", "group", "mesh", "late group", "comm", "any"]


def objective(params, worker):
    number = count(params, worker, ".")
    turn, fails = divmod(number, 2)
    way = WAYS[turn % len(WAYS)] if fails else "none"
    print(f"{number} {way}: process {os.getpid()}")
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
    if way == "any" and last:
        worker.comm.recv()
    worker.comm.barrier()
    yield params["x"]


def tell_apart(way, place, last):
    """Let the last rank fail or sleep, if `way` belongs to this position."""
    if last and way == place:
        raise ValueError(f"injected: {way}")
    if last and way == f"late {place}":
        time.sleep(3600)
