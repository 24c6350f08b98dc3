"""Group the ranks of a job by host, and place each worker on one host if possible."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI

from hpo.layout import order_ranks
from hpo.ranks.communicator import SleepingComm


def split_by_host(comm: SleepingComm) -> SleepingComm:
    """Return a communicator of the ranks on this host. Collective: call on all ranks of `comm`."""
    comm.barrier()  # MPI's call uses a full core while it waits.
    return SleepingComm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))


def sort_by_host(world: SleepingComm, host: SleepingComm, ranks_per_worker: int) -> SleepingComm:
    """Reorder the ranks of `world`, so that as few workers as possible span hosts.

    Rank 0 stays rank 0. Collective: call on all ranks of `world`.

    Args:
        host: Communicator of the ranks on this host.
        ranks_per_worker: Number of consecutive ranks that form a worker.
    """
    order = order_ranks(world.allgather(host.bcast(world.rank)), ranks_per_worker)
    return world if order == sorted(order) else world.split(0, order.index(world.rank))


def unlink_shared_memory(host: SleepingComm) -> None:
    """Unlink the file through which MPICH's ranks on a host share memory.

    All ranks must have opened it. MPICH 5.0.2 unlinks it only when MPI ends. After an abort, it
    would stay until the host reboots (1 MB per rank). UCX, which MPICH uses to communicate, unlinks
    its own files at its start, so they never stay.
    """
    if host.rank == 0:
        with suppress(OSError):  # Only Linux has /proc.
            mapped = re.findall(
                r" (/dev/shm/mpich_shm_\w+)$", Path("/proc/self/maps").read_text(), re.MULTILINE
            )
            for path in set(mapped):
                Path(path).unlink(missing_ok=True)
