"""The layout of a job: how ranks are divided into workers, and workers into islands."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import UsageError
from hpo.text_format import format_count

_OTHER_MPI = "the launcher belongs to another MPI. Use the launcher of the MPI that python -m mpi4py --mpi-library prints"
_REMEDIES = {
    "PMI_SIZE": _OTHER_MPI,
    "OMPI_COMM_WORLD_SIZE": _OTHER_MPI,
    "SLURM_STEP_NUM_TASKS": "srun must use the protocol of the MPI. Use srun --mpi=pmi2 for MPICH, or srun --mpi=pmix "
    "for Open MPI (python -m mpi4py --mpi-library prints the MPI; srun --mpi=list prints the protocols)",
}


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks, workers and islands of a job.

    Worker w has `ranks_per_worker` consecutive ranks, of which ``w * ranks_per_worker`` is the
    first. Each island has consecutive workers. The numbers of workers per island differ by at most
    one, and larger islands come first, as in Propulate.

    Raises:
        UsageError: The numbers do not fit together. The message proposes numbers that fit.
    """

    ranks: int
    ranks_per_worker: int
    islands: int

    def __post_init__(self) -> None:
        if self.ranks_per_worker < 1:
            raise UsageError(f"--ranks-per-worker must be at least 1, got {self.ranks_per_worker}")
        if self.islands < 1:
            raise UsageError(f"--islands must be at least 1, got {self.islands}")
        if self.ranks % self.ranks_per_worker:
            fitting = -(-self.ranks // self.ranks_per_worker) * self.ranks_per_worker
            raise UsageError(
                f"{format_count(self.ranks, 'rank')} cannot be divided into workers of {self.ranks_per_worker}. Start "
                f"with mpirun -n {fitting}, or with --ranks-per-worker "
                f"{_find_largest_divisor(self.ranks, self.ranks_per_worker)}"
            )
        if self.islands > self.workers:
            raise UsageError(
                f"--islands {_describe_too_many_islands(self.islands, self.ranks, self.ranks_per_worker)}, "
                f"or with --islands {self.workers}"
            )

    @classmethod
    def choose(
        cls,
        ranks: int,
        ranks_per_worker: int | None,
        islands: int | None,
        propagators: Sequence[str] = (),
    ) -> Layout:
        """Return the layout for the options of a run.

        Args:
            ranks: The number of ranks of the job.
            ranks_per_worker: Ranks of each worker. None: 2, or 1 if the number of ranks is odd.
            islands: The number of islands. None: one for each propagator, but at least 2, or 1 if
                there is only one worker.
            propagators: The propagators that the user named.

        Raises:
            UsageError: The numbers do not fit together.
        """
        size = ranks_per_worker if ranks_per_worker is not None else 2 - ranks % 2
        if islands is not None:
            return cls(ranks, size, islands)
        workers = cls(ranks, size, 1).workers
        if len(propagators) > workers:
            raise UsageError(
                f"--propagators {','.join(propagators)}: each propagator needs its own island, and "
                f"{_describe_too_many_islands(len(propagators), ranks, size)}, or name {workers}"
            )
        return cls(ranks, size, min(max(2, len(propagators)), workers))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.ranks // self.ranks_per_worker

    def find_worker(self, rank: int) -> int:
        """Return the index of the worker to which a rank belongs."""
        return rank // self.ranks_per_worker

    def list_ranks(self, worker: int) -> range:
        """Return the ranks that belong to a worker."""
        return range(worker * self.ranks_per_worker, (worker + 1) * self.ranks_per_worker)

    def count_island_workers(self, island: int) -> int:
        """Return the number of workers of an island."""
        return self.workers // self.islands + (island < self.workers % self.islands)

    def find_first_worker(self, island: int) -> int:
        """Return the index of the first worker of an island."""
        return sum(self.count_island_workers(earlier) for earlier in range(island))

    def find_island(self, worker: int) -> int:
        """Return the index of the island to which a worker belongs."""
        return next(
            i
            for i in range(self.islands)
            if worker < self.find_first_worker(i) + self.count_island_workers(i)
        )

    def __str__(self) -> str:
        return (
            f"{format_count(self.ranks, 'rank')}, {format_count(self.workers, 'worker')} of {self.ranks_per_worker}, "
            f"{format_count(self.islands, 'island')}"
        )


def describe_wrong_launch(ranks: int, environment: Mapping[str, str]) -> str:
    """Return why the processes of a job cannot communicate, so that each would start its own run; "" if they can.

    Args:
        ranks: The number of ranks that MPI reports.
        environment: The environment of this process, with the variables of the launcher.
    """
    for name, remedy in _REMEDIES.items():
        started = environment.get(name, "")
        # Ranks of mpirun may inherit the variables of srun, which starts its daemons. A shell may
        # have them, too.
        if name == "SLURM_STEP_NUM_TASKS" and {
            "PMI_SIZE",
            "OMPI_COMM_WORLD_SIZE",
            "SLURM_PTY_PORT",
        } & {*environment}:
            continue
        if ranks == 1 and started.isdecimal() and int(started) > 1:
            return f"{started} ranks were started ({name}={started}), and mpi4py finds 1: {remedy}"
    return ""


def list_usable_cores() -> list[int]:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS does not bind processes to cores.


def _describe_too_many_islands(islands: int, ranks: int, size: int) -> str:
    make = "makes" if ranks == 1 else "make"
    smaller = (
        f", or with --ranks-per-worker {_find_largest_divisor(ranks, ranks // islands)}"
        if ranks >= islands
        else ""
    )
    return (
        f"{islands} is more than the {format_count(ranks // size, 'worker')} that {format_count(ranks, 'rank')} "
        f"{make} with --ranks-per-worker {size}. Start with mpirun -n {islands * size} or more{smaller}"
    )


def _find_largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
