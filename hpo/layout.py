"""How the ranks of a job are dealt to workers, and the workers to islands, and on which cores they run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpo.errors import UsageError
from hpo.report.text import counted


@dataclass(frozen=True)
class Layout:
    """Ranks, workers and islands in plain numbers.

    Worker w holds the ranks from ``w * ranks_per_worker``; islands hold consecutive workers and differ in size by one
    at most, the larger ones first, as Propulate deals them.

    Raises UsageError, saying what would work, where the numbers do not fit together.
    """

    ranks: int
    ranks_per_worker: int
    islands: int

    def __post_init__(self) -> None:
        if self.ranks_per_worker < 1:
            raise UsageError(f"--ranks-per-worker must be at least 1, not {self.ranks_per_worker}")
        if self.islands < 1:
            raise UsageError(f"--islands must be at least 1, not {self.islands}")
        if self.ranks % self.ranks_per_worker:
            fitting = -(-self.ranks // self.ranks_per_worker) * self.ranks_per_worker
            raise UsageError(
                f"{counted(self.ranks, 'rank')} cannot be split into workers of {self.ranks_per_worker}: start with "
                f"mpirun -n {fitting}, or with --ranks-per-worker {_largest_divisor(self.ranks, self.ranks_per_worker)}"
            )
        if self.islands > self.workers:
            raise UsageError(
                f"--islands {self.islands} is more than the {counted(self.workers, 'worker')} that "
                f"{counted(self.ranks, 'rank')} make with --ranks-per-worker {self.ranks_per_worker}: start with "
                f"mpirun -n {self.islands * self.ranks_per_worker} or more, or with --islands {self.workers}"
            )

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.ranks // self.ranks_per_worker

    def worker_of(self, rank: int) -> int:
        """The worker that a rank belongs to."""
        return rank // self.ranks_per_worker

    def island_size(self, island: int) -> int:
        """The number of workers on an island."""
        return self.workers // self.islands + (island < self.workers % self.islands)

    def first_worker(self, island: int) -> int:
        """The first worker of an island."""
        return sum(self.island_size(before) for before in range(island))

    def island_of(self, worker: int) -> int:
        """The island that a worker belongs to."""
        return next(i for i in range(self.islands) if worker < self.first_worker(i) + self.island_size(i))

    def __str__(self) -> str:
        return (
            f"{counted(self.ranks, 'rank')}, {counted(self.workers, 'worker')} of {self.ranks_per_worker}, "
            f"{counted(self.islands, 'island')}"
        )


def usable_cores() -> list[int]:
    """Give the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS does not bind processes to cores


def _largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
