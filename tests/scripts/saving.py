"""A script that saves its state with `hpo`, and continues from it.

Its loss is lowest in the second epoch.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hpo

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--way", default="call")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument(
    "--seconds", type=float, default=float(os.environ.get("SAVING_SECONDS", "0.01"))
)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if args.way == "sharded" else None
progress = torch.zeros(4, dtype=torch.float64)
state, lowest = hpo.checkpoint, float("inf")
if state is not None:
    progress, lowest = state["progress"], state["lowest"]
    assert state["generator"].dtype == torch.uint8
    print(f"continues after {int(progress[0])}")


def offered():
    return {"progress": progress}


while progress[0] < args.epochs:
    time.sleep(args.seconds)
    progress += 1
    loss = args.x + abs(progress[0].item() - 2)
    whole = distribute_tensor(progress, mesh, [Shard(0)]) if mesh else progress
    state = {"progress": whole, "lowest": min(loss, lowest), "generator": torch.get_rng_state()}
    if rank == 0:
        time.sleep(args.seconds)  # the other rank reports before this one has saved
    if rank == 0 or mesh:
        hpo.save_checkpoint(state)
    if loss < lowest:
        lowest = loss
        hpo.offer_weights(offered)
    if args.way in ("call", "sharded"):
        hpo.report(loss, epoch=progress[0])
    elif args.way == f"lines of rank {rank}":
        print(f"val_loss={loss!r}", flush=True)
    dist.barrier()
dist.destroy_process_group()
