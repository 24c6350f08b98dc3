"""Measure how far the clocks of hosts differ, by messages between their ranks."""

from __future__ import annotations

import time

from hpo.check.cluster_facts import ClockOffset
from hpo.ranks.communicator import SleepingComm

_ROUNDS = 10


def measure_clock_offsets(heads: SleepingComm) -> list[ClockOffset]:
    """Return the offset of the clock of each host; on ranks other than the first, the list is incomplete.

    Method: Cristian's algorithm. The offset comes from the message with the shortest round trip. Half of this round
    trip is the maximum error (Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989).

    Collective: call on all ranks of `heads`.

    Args:
        heads: Communicator of one rank of each host.
    """
    offsets = [ClockOffset(0.0, 0.0)]
    for peer in range(1, heads.size):
        if heads.rank == 0:
            offsets.append(min((_measure_once(heads, peer) for _ in range(_ROUNDS)), key=lambda offset: offset.error))
        elif heads.rank == peer:
            for _ in range(_ROUNDS):
                heads.recv(source=0)
                heads.send(time.time(), dest=0)
    return offsets


def _measure_once(heads: SleepingComm, peer: int) -> ClockOffset:
    sent = time.time()
    heads.send(None, dest=peer)
    theirs: float = heads.recv(source=peer)
    received = time.time()
    return ClockOffset(theirs - (sent + received) / 2, (received - sent) / 2)
