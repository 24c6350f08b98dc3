"""What the watch over a rank needs to know of the other ranks of its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.process.place import Places
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.messages import Post


@dataclass(frozen=True)
class Peers:
    """A worker as one of its ranks knows it: its own number in the worker, the leader and its peers.

    `leader` and `others`, which are all ranks but this one, are numbers in the job; `names` names the others for a
    person. An evaluation that is called off has `patience` seconds to end. `places` finds the user's line in stacks.
    """

    rank: int
    leader: int
    others: Sequence[int]
    names: str
    places: Places
    patience: float


def peers_of(worker: SleepingComm, post: Post, places: Places, patience: float) -> Peers:
    """Return the peers of this rank in its worker; collective over the worker's ranks."""
    names = dict(worker.allgather((post.rank, post.name)))
    others = [rank for rank in names if rank != post.rank]
    return Peers(worker.rank, next(iter(names)), others, ", ".join(names[rank] for rank in others), places, patience)
