"""Which devices a rank computes on, and how the ranks of a worker communicate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpo.ranks.communicator import SleepingComm


def devices_here(host: SleepingComm) -> tuple[torch.device, ...]:
    """Return this rank's devices, and make the first one the current one; collective among the ranks of a host."""
    seen = tuple(map(_identity, range(torch.cuda.device_count()))) if torch.cuda.is_available() else ()
    of_ranks = host.allgather(seen)
    if not seen:
        return (torch.device("cpu"),)
    devices = tuple(torch.device("cuda", place) for place in share_of(of_ranks, host.rank))
    torch.cuda.set_device(devices[0])
    return devices


def share_of(gpus_of_ranks: Sequence[tuple[str, ...]], rank: int) -> range:
    """Return which of the GPUs that it sees a rank of a host takes, from the identities of those that each rank sees.

    Ranks that see the same GPUs divide them: evenly where there are enough, else some ranks share one. A rank that
    sees other GPUs than the others, as SLURM's --gpus-per-task has it, takes all of them.
    """
    gpus = gpus_of_ranks[rank]
    place, ranks = gpus_of_ranks[:rank].count(gpus), gpus_of_ranks.count(gpus)
    each = len(gpus) // ranks
    return range(place * each, (place + 1) * each) if each else range(place % len(gpus), place % len(gpus) + 1)


def backend_of(comm: SleepingComm, device: torch.device) -> str:
    """Return nccl where each rank has a GPU of its own, as it needs, else gloo, whose collectives take CUDA tensors."""
    gpu = _identity(device.index) if device.type == "cuda" else None
    gpus = comm.allgather(gpu)
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def _identity(place: int | None) -> str:
    return str(torch.cuda.get_device_properties(place).uuid)
