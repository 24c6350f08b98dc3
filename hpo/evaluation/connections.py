"""The connections of process groups, noted as they are made, so that a rank that waits in one can be freed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hpo.evaluation.network import is_open, open_sockets, stop_receiving


class Connections:
    """The sockets that this process opens while it makes process groups."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._before: dict[int, int] | None = None  # while a group is made
        self._held: list[socket.socket] = []

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Note the connections of a process group that is made inside ``with``."""
        self._before = open_sockets()
        try:
            yield
        finally:
            self._known |= self._new()
            self._before = None

    @property
    def are_whole(self) -> bool:
        """Whether none was closed; gloo closes them after a timeout, whose error an objective may have caught."""
        return all(is_open(descriptor, inode) for descriptor, inode in self._known.items())

    def cut(self) -> None:
        """Let what waits in these connections fail, also in a group that is being made; peers go on to wait.

        May be called from any thread.
        """
        self._held += stop_receiving({**self._known, **self._new()})

    def close(self) -> None:
        """Close the connections that were cut, which their peers notice, and forget all connections."""
        self._known = {}
        while self._held:
            self._held.pop().close()

    def _new(self) -> dict[int, int]:
        before = self._before
        if before is None:
            return {}
        return {descriptor: inode for descriptor, inode in open_sockets().items() if before.get(descriptor) != inode}
