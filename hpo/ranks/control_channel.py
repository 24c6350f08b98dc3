"""Control messages and heartbeats between the ranks of a job, separate from the messages of its computations."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hpo.process import clock
from hpo.ranks.communicator import SleepingComm

ControlMessage = tuple[Any, ...]

_SECONDS_BETWEEN_PINGS = 1.0
_PING_KIND = "alive"


class ControlChannel:
    """Sends and receives control messages on a communicator of its own. Collective: create and close it on all ranks.

    Any thread may send. Only the thread of the watch exchanges messages.

    Attributes:
        name: Name of this rank in messages to the user.
        previous_name: Name of the previous rank in the ring of all ranks, which sends heartbeats to
            this rank.
    """

    def __init__(self, world: SleepingComm) -> None:
        self.rank: int = world.rank
        self.size: int = world.size
        self._host = socket.gethostname()
        self.name = f"rank {world.rank} of the job on {self._host}"
        self.previous_name = f"rank {(world.rank - 1) % world.size} of the job"
        self._world = world
        self._comm = world.copy()
        self._outbox: queue.SimpleQueue[tuple[int, ControlMessage]] = queue.SimpleQueue()
        self._pinged_at = self._exchanged_at = self._received_at = clock.now()

    def set_worker_name(self, rank: int, worker: int) -> None:
        """Set the name of this rank to `rank` (its rank within the worker) and the index `worker`."""
        self.name = f"rank {rank} of worker {worker} on {self._host}"

    def send(self, rank: int, *message: Any) -> None:
        """Queue a message for the next exchange; any thread may call this."""
        self._outbox.put((rank, message))

    def send_now(self, rank: int, *message: Any) -> None:
        """Send a message at once, instead of at the next exchange.

        Only the thread that exchanges messages may call this. It does so when there may be no next
        exchange.
        """
        with suppress(Exception):
            self._comm.send(message, dest=rank)

    def exchange_messages(self) -> Iterator[ControlMessage]:
        """Send the queued messages, and yield the messages that have arrived."""
        self._send_ping()
        while not self._outbox.empty():
            rank, message = self._outbox.get()
            self._comm.send(message, dest=rank)
        received = []
        while self._comm.iprobe():
            received.append(self._comm.recv())
        for message in received:
            if message[0] == _PING_KIND:
                self._received_at = clock.now()
                self.previous_name = message[1]
            else:
                yield message

    def measure_silence(self) -> float:
        """Return the seconds since the latest heartbeat from the previous rank in the ring of all ranks."""
        return clock.now() - self._received_at if self.size > 1 else 0.0

    def close(self) -> None:
        """Drop pending messages. Collective: call on all ranks after the last exchange."""
        self._comm.drop_messages()

    def abort(self, status: int) -> None:
        """End the job on all hosts.

        This needs MPI's own communicator of all ranks. With a copy of it, MPICH (5.0.2) would end
        only the ranks of this host.
        """
        self._world.Abort(status)

    def _send_ping(self) -> None:
        now = clock.now()
        if now > self._exchanged_at + 3 * _SECONDS_BETWEEN_PINGS:
            # This rank was stopped, perhaps with the whole job, or was connecting, and received no
            # heartbeats.
            self._received_at = now
        self._exchanged_at = now
        if now > self._pinged_at + _SECONDS_BETWEEN_PINGS and self.size > 1:
            self._pinged_at = now
            self._comm.send((_PING_KIND, self.name), dest=(self.rank + 1) % self.size)
