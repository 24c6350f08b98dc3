"""Which GPUs a rank computes on, and how the ranks of a worker communicate. The GPUs are found by trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one rank, by what identifies them, and their numbers among those that the rank sees."""

    visible: tuple[str, ...] = ()
    own_numbers: tuple[int, ...] = ()

    @property
    def own_ids(self) -> tuple[str, ...]:
        """What identifies this rank's own GPUs."""
        return tuple(self.visible[number] for number in self.own_numbers)


def assign_gpus(gpus_of_ranks: Sequence[tuple[str, ...]], rank: int) -> range:
    """Return which of the GPUs that it sees a rank of a host takes, from the identities of those that each rank sees.

    Ranks that see the same GPUs divide them: evenly if there are enough, otherwise some ranks share one. A rank that
    sees other GPUs than the others, as SLURM's --gpus-per-task has it, takes all of them.
    """
    gpus = gpus_of_ranks[rank]
    place, ranks = gpus_of_ranks[:rank].count(gpus), gpus_of_ranks.count(gpus)
    each = len(gpus) // ranks
    return range(place * each, (place + 1) * each) if each else range(place % len(gpus), place % len(gpus) + 1)


def choose_backend(gpus: Sequence[Gpus]) -> str:
    """Return nccl if each rank of a worker has a GPU of its own, as it needs, else gloo, which takes CUDA tensors."""
    firsts = [one.own_ids[0] if one.own_ids else None for one in gpus]
    return "nccl" if None not in firsts and len(set(firsts)) == len(firsts) else "gloo"


def make_gpu_variables(
    peers: Sequence[Gpus], rank: int, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[int]]:
    """Return variables that show a trainer the GPUs of its worker's ranks on this host, and its own GPUs' numbers.

    They are in the order of the ranks, so that `cuda:LOCAL_RANK` is a rank's own, as scripts for torchrun expect it.
    `peers` are the ranks on this host, of which `rank` is the trainer's. Where these do not see the same GPUs, each has
    those that it sees.
    """
    own = peers[rank]
    if not own.own_numbers:
        return {}, []
    if any(peer.visible != own.visible for peer in peers):
        return {}, list(own.own_numbers)
    named = [name.strip() for name in environment.get(_VISIBLE_DEVICES, "").split(",") if name.strip()]
    names = named or [str(number) for number in range(len(own.visible))]
    order = list(dict.fromkeys(number for peer in peers for number in peer.own_numbers))
    return {_VISIBLE_DEVICES: ",".join(names[number] for number in order)}, [
        order.index(number) for number in own.own_numbers
    ]
