"""Facts about a job that `hpo check-cluster` collects: ranks, hosts, clocks, run directory and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.evaluation.host import Gpus, choose_backend, compute_thread_share
from hpo.layout import Layout


@dataclass(frozen=True)
class RankFacts:
    """One rank and its share of its host."""

    host: int
    """Number of the host."""
    host_name: str
    cores: tuple[int, ...]
    """CPU cores that the rank may use."""
    host_cores: int
    """Number of CPU cores of the host; hardware threads count as cores."""
    threads_per_core: int
    """Number of hardware threads of a physical core."""
    container: str
    """A text that is equal on ranks of the same container, which share a template."""
    gpus: Gpus


@dataclass(frozen=True)
class ClockOffset:
    """The clock of a host, compared with the clock of the first host."""

    seconds: float
    """The time of the host minus the time of the first host."""
    error: float
    """Maximum error of `seconds`."""


@dataclass(frozen=True)
class FolderView:
    """How a host sees the folder in which the run directory is, or would be made."""

    seconds_to_see: float | None
    """Seconds until the host has seen a change by the first host; None if it has not seen it in time."""
    sees_lock: bool
    """Whether the host sees that the first host has locked a file."""
    is_seen: bool = False
    """Whether the first host has seen a file of this host in time."""
    write_error: str = ""
    """Why the host cannot write in the folder; empty if it can."""


@dataclass(frozen=True)
class FolderFacts:
    """The folder in which the run directory is, or would be made."""

    path: Path
    file_system: str
    """Type of the file system, such as nfs4; empty if it is unknown."""
    free: int
    """Free bytes."""
    has_locks: bool
    write_seconds: float
    """Median seconds to write a small file, flush it to the disk and rename it."""


@dataclass(frozen=True)
class GroupSpeed:
    """The speed of a process group of trainers."""

    ranks: tuple[int, ...]
    """Indices of its ranks in the job."""
    failure: str
    """Why it could not be measured; empty if it was measured."""
    connect: float = 0.0
    """Seconds until the trainers had connected and begun to measure."""
    latency: float = 0.0
    """Median seconds of an all-reduce of one number."""
    bandwidth: float = 0.0
    """Bytes per second, as in NVIDIA's nccl-tests (bus bandwidth)."""


@dataclass(frozen=True)
class ClusterFacts:
    """All that `hpo check-cluster` has found out."""

    layout: Layout
    ranks: Sequence[RankFacts]
    """The ranks in the order of a run. Those of a worker are consecutive."""
    clocks: Sequence[ClockOffset]
    """The clocks of the hosts, in the order of their first ranks."""
    folder: FolderFacts
    views: Sequence[FolderView]
    """How the hosts see the folder, in the same order."""
    speeds: Sequence[GroupSpeed]
    """The process group of each worker. They were measured at the same time, as in a run."""
    between_hosts: GroupSpeed | None
    """The process group with one rank of each host; None on a single host."""
    mpi: str
    """Name and version of the MPI library."""
    launcher: str
    scheduler: str
    """Name of the scheduler and number of the job; empty without a scheduler."""
    job_end_variable: str
    """The environment variable from which a run learns when its job ends; empty if there is none."""

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts, in the order of their first ranks."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    def list_ranks(self, host: int) -> list[int]:
        """Return the indices of the ranks on a host."""
        return [index for index, rank in enumerate(self.ranks) if rank.host == host]

    def get_name(self, host: int) -> str:
        """Return the name of a host."""
        return next(rank.host_name for rank in self.ranks if rank.host == host)

    def list_names(self, ranks: Sequence[int]) -> list[str]:
        """Return the names of the hosts of these ranks, without repetitions."""
        return list(dict.fromkeys(self.ranks[rank].host_name for rank in ranks))

    def count_templates(self, host: int) -> int:
        """Return the number of templates on a host. Ranks of the same container share one."""
        return len({self.ranks[rank].container for rank in self.list_ranks(host)})

    def compute_threads(self, host: int) -> list[int]:
        """Return the number of threads of each rank on a host."""
        cores = [list(self.ranks[rank].cores) for rank in self.list_ranks(host)]
        return [compute_thread_share(cores, index) for index in range(len(cores))]

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are on several hosts."""
        return len({self.ranks[rank].host for rank in ranks}) > 1

    def choose_backend(self, ranks: Sequence[int]) -> str:
        """Return the backend of the process group of these ranks: nccl or gloo."""
        return choose_backend([self.ranks[rank].gpus for rank in ranks])
