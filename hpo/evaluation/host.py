"""The ranks on one host, and each rank's share of its cores and GPUs."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpo.evaluation.devices import Gpus, assign_gpus
from hpo.evaluation.trainer_client import TrainerEnd
from hpo.evaluation.trainer_slot import TrainerSlot
from hpo.layout import list_usable_cores
from hpo.ranks.communicator import SleepingComm


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


class Host:
    """The host of this rank, and this rank's GPUs. Collective: all ranks of a host create it together.

    Args:
        comm: Communicator of the ranks on this host.
        rank: Index of this rank in the job.

    Attributes:
        number: Number of the host: the same on all its ranks, and different on other hosts.
        gpus: GPUs of this rank; empty until `find_gpus` is called.
        problem: Why this host's GPUs cannot be used; empty if they can, or if there are none.
    """

    def __init__(self, comm: SleepingComm, rank: int) -> None:
        self.number: int = comm.bcast(rank)
        self.gpus = Gpus()
        self.problem = ""
        self._comm = comm

    @property
    def place(self) -> RankPlace:
        """The host and the GPUs of this rank."""
        return RankPlace(self.number, socket.gethostname(), self.gpus)

    def find_gpus(self, slot: TrainerSlot) -> None:
        """Ask a trainer for the visible GPUs, and set `gpus` to this rank's share.

        A process that has asked the driver is not safe to fork, so neither this rank nor the template asks.
        Collective: call on all ranks of the host.
        """
        trainer = slot.fork_other()
        found = trainer.ask("devices", "devices")
        trainer.end()  # A CUDA context would take GPU memory.
        content: Mapping[str, Any] = {} if isinstance(found, TrainerEnd) else found.content
        self.problem = found.text if isinstance(found, TrainerEnd) else content["problem"]
        seen = tuple(content.get("ids", ()))
        of_ranks: list[tuple[str, ...]] = self._comm.allgather(seen)
        if not seen:
            return
        own = [[ids[number] for number in assign_gpus(of_ranks, rank)] for rank, ids in enumerate(of_ranks) if ids]
        numbers = tuple(assign_gpus(of_ranks, self._comm.rank))
        is_shared = sum(seen[numbers[0]] in ids for ids in own) > 1
        names, variables = tuple(content["names"]), tuple(content["variables"])
        self.gpus = Gpus(seen, numbers, names, content["backend"], variables, is_shared)


def share_threads(comm: SleepingComm) -> int:
    """Return how many threads this rank's trainers may use. Collective: call on all ranks of the host."""
    return compute_thread_share(comm.allgather(list_usable_cores()), comm.rank)


def compute_thread_share(cores_of_ranks: list[list[int]], rank: int) -> int:
    """Return how many threads a rank may use, at least 1.

    A core that several ranks may use is divided evenly among them. If mpirun or SLURM binds each rank to cores of its
    own, the rank has all of these cores.

    Args:
        cores_of_ranks: The usable cores of each rank on the host.
        rank: Index of the rank in `cores_of_ranks`.
    """
    ranks_on_core = Counter(core for cores in cores_of_ranks for core in cores)
    return max(1, int(sum(1 / ranks_on_core[core] for core in cores_of_ranks[rank]) + 1e-9))
