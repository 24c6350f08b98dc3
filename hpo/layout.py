"""The layout of a job: how ranks form workers on hosts, and workers form islands."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import UsageError
from hpo.text_format import format_count

_OTHER_MPI = (
    "the launcher belongs to another MPI. Use the launcher of the MPI that "
    "python -m mpi4py --mpi-library prints"
)
_REMEDIES = {
    "PMI_SIZE": _OTHER_MPI,
    "OMPI_COMM_WORLD_SIZE": _OTHER_MPI,
    "SLURM_STEP_NUM_TASKS": (
        "srun must use the protocol of the MPI. Use srun --mpi=pmi2 for MPICH, or srun --mpi=pmix "
        "for Open MPI (python -m mpi4py --mpi-library prints the MPI; srun --mpi=list prints the "
        "protocols)"
    ),
}
# Variables of a launcher or a shell that runs inside a step of srun.
_OTHER_STARTS = frozenset(["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_PTY_PORT"])


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
                f"{format_count(self.ranks, 'rank')} cannot be divided into workers of "
                f"{self.ranks_per_worker}. Start with mpirun -n {fitting}, or with "
                f"--ranks-per-worker {_find_largest_divisor(self.ranks, self.ranks_per_worker)}"
            )
        if self.islands > self.workers:
            excess = _describe_too_many_islands(self.islands, self.ranks, self.ranks_per_worker)
            raise UsageError(f"--islands {excess}, or with --islands {self.workers}")

    @classmethod
    def choose(
        cls,
        ranks: int,
        ranks_per_worker: int | None,
        islands: int | None,
        propagators: Sequence[str] = (),
    ) -> Layout:
        """Return the layout for the options of a run.

        By default, workers have 2 ranks, or 1 if the number of ranks is odd. There is an island for
        each propagator that the user named, but at least 2, or 1 if there is only one worker.
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
        first_workers = [self.find_first_worker(island) for island in range(self.islands)]
        return bisect_right(first_workers, worker) - 1

    def __str__(self) -> str:
        return (
            f"{format_count(self.ranks, 'rank')}, {format_count(self.workers, 'worker')} of "
            f"{self.ranks_per_worker}, {format_count(self.islands, 'island')}"
        )


def describe_wrong_launch(ranks: int, environment: Mapping[str, str]) -> str:
    """Return why the processes of a job would start a run each; "" if they can communicate.

    MPI reports `ranks`, and the environment has the variables of the launcher.
    """
    for name, remedy in _REMEDIES.items():
        started = environment.get(name, "")
        # Ranks of mpirun may inherit the variables of srun, which starts its daemons. A shell may
        # have them, too.
        if name == "SLURM_STEP_NUM_TASKS" and not _OTHER_STARTS.isdisjoint(environment):
            continue
        if ranks == 1 and started.isdecimal() and int(started) > 1:
            return f"{started} ranks were started ({name}={started}), and mpi4py finds 1: {remedy}"
    return ""


def order_ranks(hosts: Sequence[int], ranks_per_worker: int) -> list[int]:
    """Return all ranks in an order in which few workers span hosts. Rank 0 stays first.

    Launchers number ranks in different ways: with SLURM's ``--distribution=cyclic``, consecutive
    ranks are on different hosts, and ``srun -N3 -n6`` starts 4, 1 and 1 ranks. Each host gets as
    many whole workers as it has ranks for. The remaining ranks of all hosts form the other workers.
    The host of each rank is given as a number.
    """
    ranks_on_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on_host.setdefault(host, []).append(rank)
    whole: list[int] = []
    rest: list[int] = []
    for ranks in ranks_on_host.values():
        end = len(ranks) - len(ranks) % ranks_per_worker
        whole += ranks[:end]
        rest += ranks[end:]
    return rest + whole if rest[:1] == [0] else whole + rest


def describe_spanning_workers(hosts: Sequence[int], ranks_per_worker: int) -> str:
    """Return which workers span hosts, and how to avoid it if possible; "" if none does.

    The hosts are in the order of `order_ranks`.
    """
    starts = range(0, len(hosts), ranks_per_worker)
    spanning = sum(len(set(hosts[start : start + ranks_per_worker])) > 1 for start in starts)
    if not spanning:
        return ""
    spans = "spans" if spanning == 1 else "span"
    text = f"{format_count(spanning, 'worker')} of {len(starts)} {spans} several hosts"
    if max(map(hosts.count, hosts)) < ranks_per_worker:
        return text
    return f"{text}. To avoid this, start a multiple of {ranks_per_worker} ranks on each host"


def list_usable_cores() -> list[int]:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS does not bind processes to cores.


def _describe_too_many_islands(islands: int, ranks: int, size: int) -> str:
    make = "makes" if ranks == 1 else "make"
    text = (
        f"{islands} is more than the {format_count(ranks // size, 'worker')} that "
        f"{format_count(ranks, 'rank')} {make} with --ranks-per-worker {size}. Start with mpirun "
        f"-n {islands * size} or more"
    )
    if ranks < islands:
        return text
    return f"{text}, or with --ranks-per-worker {_find_largest_divisor(ranks, ranks // islands)}"


def _find_largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
