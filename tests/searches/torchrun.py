"""A search whose objective is written for torchrun.

It makes its process group from environment variables.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 40))
LAUNCHERS = ("PMI", "MPI", "HYD", "OMPI", "PRTE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP")


@dataclass(frozen=True)
class Settings:
    folder: str = ""


def check_group(size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size == dist.get_world_size()


def use_comm(worker):
    """Call each method of worker.comm, and return the results."""
    comm, rank = worker.comm, worker.rank
    comm.barrier()
    comm.send({"from": rank}, (rank + 1) % worker.size, tag=3)
    comm.send([rank], (rank + 1) % worker.size, tag=4)
    found = [comm.recv(tag=4), comm.recv((rank - 1) % worker.size, tag=3)]
    return {
        "received": found,
        "bcast": comm.bcast(rank, root=1),
        "gather": comm.gather(rank, root=1),
        "allgather": comm.allgather(str(rank)),
        "allreduce": comm.allreduce(rank),
        "reduce": comm.reduce(rank + 1, max),
        "sizes": [comm.rank, comm.size, comm.Get_rank(), comm.Get_size()],
    }


def objective(params, worker, settings):
    environment = dict(os.environ)
    used = use_comm(worker)
    dist.init_process_group("gloo")  # gets the group that is up
    kept = dist.group.WORLD
    check_group(worker.size)
    dist.destroy_process_group()
    dist.init_process_group()  # A second group.
    assert dist.group.WORLD is not kept
    check_group(worker.size)
    dist.init_process_group("gloo")  # which torch would refuse
    check_group(worker.size)
    dist.destroy_process_group()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo", init_method="env://", rank=rank, world_size=size)
    check_group(worker.size)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    met = store.add("ranks", 1)  # of a store that is empty at the beginning of each evaluation
    store.wait(["ranks"])
    loader: Any = DataLoader(list(range(8)), num_workers=2, batch_size=2)  # type: ignore[arg-type]
    samples = [value for batch in loader for value in batch.tolist()]
    seen = {
        "environment": environment,
        "comm": used,
        "samples": samples,
        "met": met,
        "process": os.getpid(),
    }
    Path(settings.folder, f"{params['k']}-{worker.rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    return float(params["k"])
