"""Run a function on the ranks of a worker, without the processes that supervise ranks.

Ranks are forked, as trainers are, from a process that has computed nothing.
"""

import gc
import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which each rank's first optimizer would import, for 1.5 s of CPU time
import torch.distributed as dist

from hpo.process.linux import end_with_parent
from hpo.process.messages import GroupTicket
from hpo.trainer.trainer_group import TrainerGroup

SECONDS = 60.0  # for which ranks wait for each other


def run_ranks(size, run, seed=0):
    """Call `run(worker)` in a forked process for each rank of a worker.

    Exit with status 1 if one of them fails.
    """
    children, parent = [], os.getpid()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            child = os.fork()
            if child == 0:
                end_with_parent(parent)
                _become_rank(rank, size, Path(folder, "store"), run, seed)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(1)


def _become_rank(rank, size, store, run, seed):
    status = 1
    try:
        gc.freeze()  # Garbage collection is faster without the objects of torch.
        torch.set_num_threads(1)  # networks this small are computed faster so
        group = TrainerGroup()
        address, environment = ["127.0.0.1", 0], {"GLOO_SOCKET_IFNAME": "lo"}
        group.join(
            GroupTicket(
                "group", rank, size, 0, "gloo", [], str(store), address, SECONDS, environment
            )
        )
        run(group.make_worker(seed))
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
