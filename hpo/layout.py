"""How the ranks of a job are dealt to workers, and the workers to islands, and on which cores they run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import UsageError
from hpo.text_format import format_count


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
                f"{format_count(self.ranks, 'rank')} cannot be split into workers of {self.ranks_per_worker}: "
                f"start with "
                f"mpirun -n {fitting}, or with --ranks-per-worker "
                f"{_find_largest_divisor(self.ranks, self.ranks_per_worker)}"
            )
        if self.islands > self.workers:
            raise UsageError(
                f"--islands {_describe_too_many_islands(self.islands, self.ranks, self.ranks_per_worker)}, "
                f"or with --islands {self.workers}"
            )

    @classmethod
    def choose(
        cls, ranks: int, ranks_per_worker: int | None, islands: int | None, propagators: Sequence[str] = ()
    ) -> Layout:
        """Return the layout that is asked for; a number that is None is chosen to fit the ranks and the propagators.

        Raises UsageError where the numbers do not fit together.
        """
        size = ranks_per_worker if ranks_per_worker is not None else 2 - ranks % 2
        if islands is not None:
            return cls(ranks, size, islands)
        workers = cls(ranks, size, 1).workers
        if len(propagators) > workers:
            raise UsageError(
                f"--propagators {','.join(propagators)}: each is for an island of its own, and "
                f"{_describe_too_many_islands(len(propagators), ranks, size)}, or name {workers}"
            )
        return cls(ranks, size, min(max(2, len(propagators)), workers))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.ranks // self.ranks_per_worker

    def find_worker(self, rank: int) -> int:
        """The worker that a rank belongs to."""
        return rank // self.ranks_per_worker

    def list_ranks(self, worker: int) -> range:
        """The ranks of a worker."""
        return range(worker * self.ranks_per_worker, (worker + 1) * self.ranks_per_worker)

    def count_island_workers(self, island: int) -> int:
        """The number of workers on an island."""
        return self.workers // self.islands + (island < self.workers % self.islands)

    def find_first_worker(self, island: int) -> int:
        """The first worker of an island."""
        return sum(self.count_island_workers(before) for before in range(island))

    def find_island(self, worker: int) -> int:
        """The island that a worker belongs to."""
        return next(i for i in range(self.islands) if worker < self.find_first_worker(i) + self.count_island_workers(i))

    def __str__(self) -> str:
        return (
            f"{format_count(self.ranks, 'rank')}, {format_count(self.workers, 'worker')} of {self.ranks_per_worker}, "
            f"{format_count(self.islands, 'island')}"
        )


def check_launch(ranks: int, environment: Mapping[str, str]) -> None:
    """Raise a UsageError where several processes were started, and each takes itself for the only rank.

    Each of them would start a run of its own.
    """
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        started = environment.get(name, "")
        if ranks == 1 and started.isdecimal() and int(started) > 1:
            raise UsageError(
                f"{started} ranks were started ({name}={started}), and each finds itself alone: the launcher is of "
                "another MPI than mpi4py, whose MPI python -m mpi4py --mpi-library names; start with that one's"
            )


def list_usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS does not bind processes to cores


def _describe_too_many_islands(islands: int, ranks: int, size: int) -> str:
    """Return why there cannot be so many islands, and how to start a job that has enough workers for them."""
    make = "makes" if ranks == 1 else "make"
    smaller = (
        f", or with --ranks-per-worker {_find_largest_divisor(ranks, ranks // islands)}" if ranks >= islands else ""
    )
    return (
        f"{islands} is more than the {format_count(ranks // size, 'worker')} that {format_count(ranks, 'rank')} "
        f"{make} with "
        f"--ranks-per-worker {size}: start with mpirun -n {islands * size} or more{smaller}"
    )


def _find_largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
