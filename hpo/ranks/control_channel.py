"""Messages between the ranks of a job, apart from those of its computations, and signs that each rank is alive."""

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
    """Sends and receives on a communicator of its own; made and left by all ranks of `world` together.

    Any thread may send, but only the watch's thread exchanges. ``name`` names this rank for a person, and ``previous``
    the rank before it in the ring of all ranks.
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
        """Name this rank by its worker, as in the lines that objectives print, and in failures."""
        self.name = f"rank {rank} of worker {worker} on {self._host}"

    def send(self, rank: int, *message: Any) -> None:
        """Let a message be sent at the next exchange; any thread may call this."""
        self._outbox.put((rank, message))

    def send_now(self, rank: int, *message: Any) -> None:
        """Send a message at once; only for the thread that exchanges, which may never exchange again."""
        with suppress(Exception):
            self._comm.send(message, dest=rank)

    def exchange_messages(self) -> Iterator[ControlMessage]:
        """Send the messages that wait, and yield those that have come."""
        self._send_ping()
        while not self._outbox.empty():
            rank, message = self._outbox.get()
            self._comm.send(message, dest=rank)
        came = []
        while self._comm.iprobe():
            came.append(self._comm.recv())
        for message in came:
            if message[0] == _PING_KIND:
                self._received_at, self.previous_name = clock.now(), message[1]
            else:
                yield message

    def measure_silence(self) -> float:
        """Return the seconds for which nothing has come from the previous rank, in the ring of all ranks."""
        return clock.now() - self._received_at if self.size > 1 else 0.0

    def close(self) -> None:
        """Drop messages that are on their way; collective, and after the last exchange."""
        self._comm.drop_messages()

    def abort(self, status: int) -> None:
        """End the job on all hosts; with a copy of the world, MPICH (5.0.2) would end the ranks of this host only."""
        self._world.Abort(status)

    def _send_ping(self) -> None:
        now = clock.now()
        if now > self._exchanged_at + 3 * _SECONDS_BETWEEN_PINGS:
            self._received_at = (
                now  # this rank has not listened: it slept, perhaps with the whole job, or was connecting
            )
        self._exchanged_at = now
        if now > self._pinged_at + _SECONDS_BETWEEN_PINGS and self.size > 1:
            self._pinged_at = now
            self._comm.send((_PING_KIND, self.name), dest=(self.rank + 1) % self.size)
