"""Assign the GPUs of a host to its ranks, and choose how the ranks of a worker communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import UsageError
from hpo.text_format import format_count

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one rank."""

    visible: tuple[str, ...] = ()
    """Identifiers of all GPUs that the rank sees."""
    own_numbers: tuple[int, ...] = ()
    """Indices, in `visible`, of the GPUs on which the rank computes."""

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Identifiers of the GPUs on which the rank computes."""
        return tuple(self.visible[number] for number in self.own_numbers)


def assign_gpus(gpus_of_ranks: Sequence[tuple[str, ...]], rank: int) -> range:
    """Return the indices of the GPUs that a rank uses, among the GPUs that it sees.

    Ranks that see the same GPUs divide them evenly. If there are fewer GPUs than ranks, some ranks share one. A rank
    that sees other GPUs than its peers, as with SLURM's --gpus-per-task, uses all GPUs that it sees.

    Args:
        gpus_of_ranks: Identifiers of the visible GPUs of each rank on the host.
        rank: Index of the rank in `gpus_of_ranks`.
    """
    gpus = gpus_of_ranks[rank]
    index, ranks = gpus_of_ranks[:rank].count(gpus), gpus_of_ranks.count(gpus)
    count = len(gpus) // ranks
    return range(index * count, (index + 1) * count) if count else range(index % len(gpus), index % len(gpus) + 1)


def check_gpus(gpus_of_ranks: Sequence[tuple[str, int]]) -> None:
    """Raise an error if some ranks see GPUs and other ranks do not.

    Args:
        gpus_of_ranks: The name of the host, and the number of visible GPUs, of each rank.

    Raises:
        UsageError: Some ranks see no GPU.
    """
    without = [host for host, count in gpus_of_ranks if not count]
    seeing = [host for host, count in gpus_of_ranks if count]
    if without and seeing:
        raise UsageError(
            f"{format_count(len(without), 'rank')} on {', '.join(dict.fromkeys(without))} "
            f"see{'s' if len(without) == 1 else ''} no GPU, but ranks on {', '.join(dict.fromkeys(seeing))} do. "
            "Request GPUs for all ranks, for example with srun --gpus-per-task=1. To use none: "
            "export CUDA_VISIBLE_DEVICES="
        )


def choose_backend(gpus: Sequence[Gpus]) -> str:
    """Return "nccl" if each rank has a GPU of its own, otherwise "gloo"."""
    firsts = [rank_gpus.own_ids[0] if rank_gpus.own_ids else None for rank_gpus in gpus]
    return "nccl" if None not in firsts and len(set(firsts)) == len(firsts) else "gloo"


def make_gpu_variables(
    peers: Sequence[Gpus], rank: int, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[int]]:
    """Return environment variables for a trainer (process that runs the objective for one rank), and GPU indices.

    The variables let the trainer see all GPUs of its worker on this host, in the order of the ranks. Then
    `cuda:LOCAL_RANK` is the GPU of the rank itself, as scripts for torchrun expect. If the ranks do not see the same
    GPUs, no variable is set, and the trainer sees the GPUs that its rank sees. The indices select the rank's own GPUs
    among the GPUs that the trainer sees.

    Args:
        peers: GPUs of the worker's ranks on this host.
        rank: Index in `peers` of the trainer's rank.
        environment: Environment variables of this rank.
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
