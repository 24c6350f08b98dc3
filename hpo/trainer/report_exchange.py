"""Let the trainers of a worker agree on each report, over connections of their own."""

from __future__ import annotations

import json
import math
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from hpo.process import clock
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.messages import ReportAnswer

# Relative difference. Losses of one network differ less between devices. Losses on different shards
# of a validation set differ more, unless each has millions of samples.
_TOLERANCE = 1e-3
_KEY = "hpo/reports"  # of the store, for the address of rank 0
_SHORT_WAIT = 0.5  # seconds; the clock must be read more often than every 2 s
# Fields of a part that must be the same on all ranks, and what the ranks have done if it is set.
_GATHERING_ACTIONS = {
    "gathers_weights": "offered a function, which all of them have to call",
    "gathers_checkpoint": "saved a function, or sharded tensors, which all of them have to gather",
}
_SECONDS_TO_INTRODUCE = 10.0


@dataclass(frozen=True)
class ReportPart:
    """The contribution of one trainer to a report."""

    rank: int
    loss: float | None
    """None if the objective has ended without another loss."""
    position: str = ""
    """Line of the objective, such as "my_search.py:33"."""
    has_ended: bool = False
    """Whether the objective has returned with this loss, or without a loss."""
    gathers_weights: bool = False
    """Whether all ranks must work together to gather the offered weights."""
    gathers_checkpoint: bool = False
    """Whether all ranks must work together to gather the saved checkpoint."""


class ReportExchange:
    """Connects rank 0 of a worker with each other rank. Collective: create it on all ranks.

    The process groups of the objective are not used, since the objective may replace or misuse
    them. `store` has the address of rank 0, as the other ranks reach it. A rank waits for at most
    `patience` seconds for its peers to report. Raises RuntimeError if the ranks cannot connect.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str,
        connect_timeout: float,
        patience: float,
    ) -> None:
        self._rank = rank
        self._patience = patience
        # On rank 0, in the order of the other ranks; otherwise only rank 0.
        self._peers: list[Channel] = []
        try:
            if rank > 0:
                host, port, token = json.loads(store.get(_KEY))
                self._peers = [
                    _make_channel(socket.create_connection((host, port), connect_timeout))
                ]
                self._peers[0].send("hello", rank=rank, token=token)
            elif size > 1:
                self._peers = _accept_peers(store, size, address, connect_timeout)
        except (OSError, ChannelClosed, ValueError) as error:
            raise RuntimeError(f"the ranks cannot connect for their reports: {error}") from error

    def collect(self, part: ReportPart) -> list[ReportPart] | None:
        """Return the parts of all ranks on rank 0; None on other ranks. Collective.

        Raises RuntimeError if a peer has not reported in time, or its process has ended.
        """
        give_up_at = clock.now() + self._patience
        for peer in self._peers:
            self._send(peer, "part", **vars(part))
        parts = [ReportPart(**self._receive(peer, give_up_at).content) for peer in self._peers]
        return [part, *parts] if self._rank == 0 else None

    def broadcast(self, answer: ReportAnswer | None) -> ReportAnswer:
        """Return the `answer` of rank 0 on all ranks; it is None on other ranks. Collective.

        The other ranks wait without a limit, since the leader may wait for a database. Raises
        RuntimeError if the process of rank 0 has ended.
        """
        if answer is None:
            return ReportAnswer(**self._receive(self._peers[0], math.inf).content)
        for peer in self._peers:
            self._send(peer, "answer", **vars(answer))
        return answer

    def _send(self, peer: Channel, kind: str, **content: object) -> None:
        try:
            peer.send(kind, **content)
        except ChannelClosed as error:
            raise RuntimeError(f"Connection closed by peer ({error})") from None

    def _receive(self, peer: Channel, give_up_at: float) -> Message:
        try:
            while (message := peer.receive(_SHORT_WAIT)) is None:
                if clock.now() > give_up_at:
                    raise RuntimeError(
                        f"Timed out waiting {self._patience:g} s for the reports of other ranks"
                    )
        except ChannelClosed as error:
            raise RuntimeError(f"Connection closed by peer ({error})") from None
        return message


def _accept_peers(store: Store, size: int, address: str, timeout: float) -> list[Channel]:
    """Accept a connection of each other rank. Other processes do not know the token."""
    token = secrets.token_hex(16)
    give_up_at = time.monotonic() + timeout
    peers: dict[int, Channel] = {}
    with socket.create_server((address, 0), backlog=size) as listener:
        store.set(_KEY, json.dumps([address, listener.getsockname()[1], token]))
        while len(peers) < size - 1:
            listener.settimeout(max(0.01, give_up_at - time.monotonic()))
            channel = _make_channel(listener.accept()[0])
            try:
                hello = channel.receive(_SECONDS_TO_INTRODUCE)
            except ChannelClosed:
                hello = None
            if hello is None or hello.get("token") != token:
                channel.close()
            else:
                peers[hello["rank"]] = channel
    return [peers[rank] for rank in sorted(peers)]


def _make_channel(connection: socket.socket) -> Channel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection)


def find_difference(parts: Sequence[ReportPart]) -> str:
    """Return how the parts of a worker's ranks contradict each other; empty if they agree."""
    losses = [part.loss for part in parts if part.loss is not None]
    if not losses:
        return ""
    yielded = ["ended" if part.loss is None else part.loss for part in parts]
    if len(losses) < len(parts):
        described = _describe_parts(parts, yielded)
        return f"the ranks do not yield equally many losses: {described}"
    if not all(math.isclose(loss, losses[0], rel_tol=_TOLERANCE, abs_tol=1e-12) for loss in losses):
        described = _describe_parts(parts, yielded)
        return f"the ranks yielded different losses: {described}; all_reduce it, for example"
    for name, action in _GATHERING_ACTIONS.items():
        acted = [getattr(part, name) for part in parts]
        if len(set(acted)) > 1:
            described = _describe_parts(parts, ["did" if has else "did not" for has in acted])
            return f"not all ranks {action}: {described}"
    return ""


def _describe_parts(parts: Sequence[ReportPart], actions: Sequence[object]) -> str:
    """Return what each rank has done, and where."""
    return ", ".join(
        f"rank {part.rank} {action}" + (f" at {part.position}" if part.position else "")
        for part, action in zip(parts, actions, strict=True)
    )
