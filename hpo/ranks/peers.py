"""The other ranks of a worker, for the watch over one rank (a thread that handles signals and messages)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.ranks.communicator import SleepingComm
from hpo.ranks.control_channel import ControlChannel


@dataclass(frozen=True)
class Peers:
    """The other ranks of a worker."""

    leader: int
    """Index in the job of the worker's leader (its first rank)."""
    others: Sequence[int]
    """Indices in the job of all ranks of the worker except this one."""
    names: str
    """Names of the other ranks in messages to the user, separated by commas."""
    patience: float
    """Maximum seconds for which a rank waits for its peers."""


def find_peers(worker: SleepingComm, control_channel: ControlChannel, patience: float) -> Peers:
    """Return the other ranks of this rank's worker. Collective: call on all ranks of the worker.

    Args:
        worker: Communicator of the worker's ranks.
        patience: Maximum seconds for which a rank waits for its peers.
    """
    names = dict(worker.allgather((control_channel.rank, control_channel.name)))
    others = [rank for rank in names if rank != control_channel.rank]
    return Peers(next(iter(names)), others, ", ".join(names[rank] for rank in others), patience)
