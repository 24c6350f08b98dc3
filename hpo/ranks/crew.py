"""The ranks of a worker, as the watch over one of them needs to know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.process.place import Places
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.messages import Post


@dataclass(frozen=True)
class Crew:
    """A rank's number in its worker, and the worker's other ranks by their numbers in the job.

    `names` says to a person who the others are. An evaluation that is called off has `patience` seconds to come to an
    end. `places` finds the user's line in stacks.
    """

    rank: int
    leader: int
    peers: Sequence[int]
    names: str
    places: Places
    patience: float


def crew_of(worker: SleepingComm, post: Post, places: Places, patience: float) -> Crew:
    """Find out who is in a worker; collective over its ranks."""
    names = dict(worker.allgather((post.rank, post.name)))
    peers = [rank for rank in names if rank != post.rank]
    return Crew(worker.rank, next(iter(names)), peers, ", ".join(names[rank] for rank in peers), places, patience)
