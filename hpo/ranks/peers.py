"""What the watch over a rank needs to know of the other ranks of its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.ranks.communicator import SleepingComm
from hpo.ranks.control_channel import ControlChannel


@dataclass(frozen=True)
class Peers:
    """A worker as one of its ranks knows it.

    `leader`, and `others`, which are all ranks but this one, are numbers in the job; `names` names the others for a
    person. Ranks wait for each other for `patience` seconds.
    """

    leader: int
    others: Sequence[int]
    names: str
    patience: float


def find_peers(worker: SleepingComm, post: ControlChannel, patience: float) -> Peers:
    """Return the peers of this rank in its worker; collective over the worker's ranks."""
    names = dict(worker.allgather((post.rank, post.name)))
    others = [rank for rank in names if rank != post.rank]
    return Peers(next(iter(names)), others, ", ".join(names[rank] for rank in others), patience)
