"""What the watch over a rank needs to know of the other ranks of its worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.process.place import Places
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.messages import Post


@dataclass(frozen=True)
class Crew:
    """A worker as one of its ranks knows it: its own number in the worker, the leader and its peers.

    `leader` and `peers`, which are all ranks but this one, are numbers in the job; `names` names the peers for a
    person. An evaluation that is called off has `patience` seconds to end. `places` finds the user's line in stacks.
    """

    rank: int
    leader: int
    peers: Sequence[int]
    names: str
    places: Places
    patience: float


def crew_of(worker: SleepingComm, post: Post, places: Places, patience: float) -> Crew:
    """Return the crew of this rank's worker; collective over the worker's ranks."""
    names = dict(worker.allgather((post.rank, post.name)))
    peers = [rank for rank in names if rank != post.rank]
    return Crew(worker.rank, next(iter(names)), peers, ", ".join(names[rank] for rank in peers), places, patience)
