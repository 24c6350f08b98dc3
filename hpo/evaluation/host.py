"""The ranks on one host, and each rank's share of its cores and GPUs."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.errors import UsageError
from hpo.evaluation.trainer_client import TrainerEnd, TrainerSlot
from hpo.layout import Layout
from hpo.ranks.communicator import SleepingComm
from hpo.text_format import format_count


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one rank."""

    visible: tuple[str, ...] = ()
    """Identifiers of all GPUs that the rank sees."""
    own_numbers: tuple[int, ...] = ()
    """Indices, in `visible`, of the GPUs on which the rank computes."""
    names: tuple[str, ...] = ()
    """Names of the models of the visible GPUs, such as "NVIDIA H100 80GB HBM3"."""
    backend: str = "nccl"
    """Backend of process groups for these GPUs."""
    variables: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
    """Environment variables that select the visible GPUs; the first that is set counts."""
    is_shared: bool = False
    """Whether another rank computes on the same GPU."""

    @property
    def own_ids(self) -> tuple[str, ...]:
        """Identifiers of the GPUs on which the rank computes."""
        return tuple(self.visible[number] for number in self.own_numbers)

    @property
    def is_slice(self) -> bool:
        """Whether the GPU on which the rank computes is a slice of a GPU (MIG)."""
        return any(" MIG " in self.names[number] for number in self.own_numbers[:1] if self.names)


def assign_gpus(gpus_of_ranks: Sequence[tuple[str, ...]], rank: int) -> range:
    """Return the indices of the GPUs that a rank uses, among the GPUs that it sees.

    Ranks that see the same GPUs divide them evenly. If there are fewer GPUs than ranks, some ranks
    share one. A rank that sees other GPUs than its peers, as with SLURM's --gpus-per-task, uses all
    GPUs that it sees.

    Args:
        gpus_of_ranks: Identifiers of the visible GPUs of each rank on the host.
    """
    gpus = gpus_of_ranks[rank]
    index = gpus_of_ranks[:rank].count(gpus)
    ranks = gpus_of_ranks.count(gpus)
    count = len(gpus) // ranks
    if count == 0:
        index %= len(gpus)
        count = 1
    return range(index * count, (index + 1) * count)


def check_gpus(gpus_of_ranks: Sequence[tuple[str, int, str]]) -> None:
    """Raise an error if a rank cannot use its GPUs, or if only some ranks see GPUs.

    Args:
        gpus_of_ranks: The name of the host, the number of visible GPUs, and a problem or an empty
            text, of each rank.

    Raises:
        UsageError: Some ranks see no GPU, or torch cannot use the GPUs of a host.
    """
    problems = dict.fromkeys(f"{host}: {problem}" for host, _, problem in gpus_of_ranks if problem)
    if problems:
        raise UsageError(
            f"torch must be able to use the GPUs of each host. {'; '.join(problems)}. "
            "To compute on CPUs: export CUDA_VISIBLE_DEVICES="
        )
    without = [host for host, count, _ in gpus_of_ranks if not count]
    seeing = [host for host, count, _ in gpus_of_ranks if count]
    if without and seeing:
        see = "sees" if len(without) == 1 else "see"
        raise UsageError(
            f"{format_count(len(without), 'rank')} on {', '.join(dict.fromkeys(without))} {see} no "
            f"GPU, but ranks on {', '.join(dict.fromkeys(seeing))} do. Request GPUs for all ranks, "
            "for example with srun --gpus-per-node=4 --gpu-bind=none. To use none: export "
            "CUDA_VISIBLE_DEVICES="
        )


def choose_backend(gpus: Sequence[Gpus]) -> str:
    """Return the backend of a worker's process group.

    It is the backend of the GPUs if each rank has a GPU of its own, otherwise "gloo". Two slices of
    one GPU (MIG) count as the same GPU for NCCL.
    """
    firsts = [rank_gpus.own_ids[0] if rank_gpus.own_ids else None for rank_gpus in gpus]
    has_slices = len(gpus) > 1 and any(rank_gpus.is_slice for rank_gpus in gpus)
    is_separate = None not in firsts and len(set(firsts)) == len(firsts) and not has_slices
    return gpus[0].backend if is_separate else "gloo"


def see_same_gpus(peers: Sequence[Gpus]) -> bool:
    """Return whether all these ranks of one host see the same GPUs."""
    return all(peer.visible == peers[0].visible for peer in peers)


def has_separated_worker(layout: Layout, hosts: Sequence[int], gpus: Sequence[Gpus]) -> bool:
    """Return whether ranks of a worker on one host see different GPUs (SLURM's --gpus-per-task)."""
    for worker in range(layout.workers):
        ranks = layout.list_ranks(worker)
        for host in {hosts[rank] for rank in ranks}:
            if not see_same_gpus([gpus[rank] for rank in ranks if hosts[rank] == host]):
                return True
    return False


def make_gpu_variables(
    peers: Sequence[Gpus], rank: int, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[int]]:
    """Return environment variables for a trainer, and GPU indices.

    The variables let the trainer see all GPUs of its worker on this host: first the first GPU of
    each rank, in the order of the ranks. Then `cuda:LOCAL_RANK` is the GPU of the rank itself, as
    scripts for torchrun expect. If the ranks do not see the same GPUs, no variable is set, and the
    trainer sees the GPUs that its rank sees. The indices select the rank's own GPUs among the GPUs
    that the trainer sees. `peers` are the GPUs of the worker's ranks on this host.
    """
    own = peers[rank]
    if not own.own_numbers:
        return {}, []
    if not see_same_gpus(peers) or not own.variables:
        return {}, list(own.own_numbers)
    value = next((environment[name] for name in own.variables if environment.get(name)), "")
    names = [name.strip() for name in value.split(",") if name.strip()]
    names = names or [str(number) for number in range(len(own.visible))]
    firsts = [peer.own_numbers[0] for peer in peers]
    numbers = [number for peer in peers for number in peer.own_numbers]
    order = list(dict.fromkeys([*firsts, *numbers]))
    visible = ",".join(names[number] for number in order)
    return {own.variables[0]: visible}, [order.index(number) for number in own.own_numbers]


def describe_gpus(gpus_of_ranks: Sequence[Gpus], backends: Sequence[str]) -> str:
    """Return which GPUs a run uses, for its first line; "on CPUs" without any."""
    used = {gpu_id for gpus in gpus_of_ranks for gpu_id in gpus.own_ids}
    if not used:
        return "on CPUs"
    models = dict.fromkeys(
        gpus.names[number] for gpus in gpus_of_ranks for number in gpus.own_numbers if gpus.names
    )
    per_rank = len(gpus_of_ranks[0].own_numbers)
    is_shared = any(gpus.is_shared for gpus in gpus_of_ranks)
    share = "several ranks on each" if is_shared else f"{per_rank} per rank"
    count = format_count(len(used), "GPU")
    description = f" ({', '.join(models)})" if models else ""
    return f"{count}{description}, {share}, {', '.join(dict.fromkeys(backends))}"


@dataclass(frozen=True)
class RankPlace:
    """The host and the GPUs of a rank."""

    host: int
    """Number of the host, the same for all its ranks."""
    host_name: str
    gpus: Gpus

    def describe(self) -> str:
        """Return the name of the host and the identifiers of the rank's GPUs."""
        return ", ".join([self.host_name, *(f"GPU {gpu_id}" for gpu_id in self.gpus.own_ids)])


def find_place(comm: SleepingComm, rank: int, slot: TrainerSlot) -> tuple[RankPlace, str]:
    """Return the place of this rank, and why its GPUs cannot be used; empty if they can.

    A trainer is asked for the visible GPUs. A process that has asked the driver is not safe to
    fork, so neither this rank nor the template asks. Collective: call on all ranks of a host.

    Args:
        comm: The ranks of the host.
        rank: The rank of this process in the job.
    """
    number: int = comm.bcast(rank)
    trainer = slot.fork_other()
    found = trainer.ask("devices", "devices")
    trainer.discard()
    trainer.wait_for_exit()  # A CUDA context would take GPU memory.
    content: Mapping[str, Any] = {} if isinstance(found, TrainerEnd) else found.content
    problem = found.text if isinstance(found, TrainerEnd) else content["problem"]
    of_ranks: list[tuple[str, ...]] = comm.allgather(tuple(content.get("ids", ())))
    gpus = _share_gpus(of_ranks, comm.rank, content) if of_ranks[comm.rank] else Gpus()
    return RankPlace(number, socket.gethostname(), gpus), problem


def _share_gpus(of_ranks: Sequence[tuple[str, ...]], rank: int, content: Mapping[str, Any]) -> Gpus:
    """Return a rank's share of the GPUs that the ranks of its host see.

    `content` describes those that the rank itself sees, at least one.
    """
    seen = of_ranks[rank]
    own = tuple(assign_gpus(of_ranks, rank))
    users = 0  # ranks that compute on the first GPU of this rank
    for other, ids in enumerate(of_ranks):
        if ids:
            users += seen[own[0]] in [ids[number] for number in assign_gpus(of_ranks, other)]
    names = tuple(content["names"])
    variables = tuple(content["variables"])
    return Gpus(seen, own, names, content["backend"], variables, is_shared=users > 1)


def compute_thread_share(cores_of_ranks: list[list[int]], rank: int) -> int:
    """Return how many threads a rank may use, at least 1.

    A core that several ranks may use is divided evenly among them. If mpirun or SLURM binds each
    rank to cores of its own, the rank has all of these cores.

    Args:
        cores_of_ranks: The usable cores of each rank on the host.
    """
    ranks_on_core = Counter(core for cores in cores_of_ranks for core in cores)
    return max(1, int(sum(1 / ranks_on_core[core] for core in cores_of_ranks[rank]) + 1e-9))
