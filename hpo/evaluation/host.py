"""What a rank has on its host: the ranks next to it, its share of the cores and of the GPUs."""

from __future__ import annotations

from collections import Counter

from hpo.errors import RunError
from hpo.evaluation.devices import Gpus, assign_gpus
from hpo.evaluation.trainer_client import TrainerEnd, TrainerSlot
from hpo.layout import list_usable_cores
from hpo.ranks.communicator import SleepingComm


class Host:
    """The host of this rank, and this rank's GPUs; made by all ranks of a host.

    `number` is the same for all of them, and for no other host.
    """

    def __init__(self, comm: SleepingComm, rank: int) -> None:
        """Begin without GPUs; `rank` is this rank's number in the job."""
        self.number: int = comm.bcast(rank)
        self.gpus = Gpus()
        self._comm = comm

    def find_gpus(self, slot: TrainerSlot) -> None:
        """Let a trainer find the GPUs that this rank sees, and take this rank's share; collective over the host."""
        trainer = slot.fork_other()
        found = trainer.ask("devices", "devices")
        if isinstance(found, TrainerEnd):
            raise RunError(f"the GPUs cannot be looked up: {found.text}")
        trainer.kill()  # it has a CUDA context
        trainer.close()
        seen = tuple(found["gpus"])
        of_ranks: list[tuple[str, ...]] = self._comm.allgather(seen)
        self.gpus = Gpus(seen, tuple(assign_gpus(of_ranks, self._comm.rank)) if seen else ())


def share_threads(comm: SleepingComm) -> int:
    """Return how many threads this rank's trainers may have; collective over the ranks of a host."""
    return compute_thread_share(comm.allgather(list_usable_cores()), comm.rank)


def compute_thread_share(cores_of_ranks: list[list[int]], rank: int) -> int:
    """Return how many threads a rank may have, from the cores that each rank on the host may use.

    Ranks share a core evenly. Where mpirun or SLURM binds ranks to cores, a core belongs to one rank.
    """
    ranks_on_core = Counter(core for cores in cores_of_ranks for core in cores)
    return max(1, int(sum(1 / ranks_on_core[core] for core in cores_of_ranks[rank]) + 1e-9))
