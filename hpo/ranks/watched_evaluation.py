"""The evaluation that a rank supervises, as its watch knows it: any thread may call it off, at any moment."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class WatchedEvaluation:
    """An evaluation; `number` counts the worker's evaluations, and is the same on all its ranks.

    ``cause`` is why the evaluation was called off, None while it was not. `tell` tells the peers: it is called with
    `number` and the cause; `notify_leader` sends something to the worker's leader. The main thread can wait for a
    call-off, or for what others have sent, together with other files, by the rank's `event`.
    """

    def __init__(
        self,
        number: int,
        event: int,
        notify_peers: Callable[[int, str], None],
        notify_leader: Callable[[int, Any], None],
    ) -> None:
        self.number = number
        self.cause: str | None = None
        self._notify_peers = notify_peers
        self._notify_leader = notify_leader
        self._reports: deque[Any] = deque()
        self._event = event
        self.clear_event()

    def fileno(self) -> int:
        """Return the descriptor to wait for; it can be read from the call-off until `clear`."""
        return self._event

    def clear_event(self) -> None:
        """Take note of a call-off, or of what others have sent."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def cancel_on_all(self, cause: str) -> None:
        """Call the evaluation off on all ranks of the worker."""
        self.cancel_here(cause)
        self._notify_peers(self.number, cause)

    def send_report(self, content: Any) -> None:
        """Send something to the worker's leader, which gets it by `take_reports`."""
        self._notify_leader(self.number, content)

    def add_report(self, content: Any) -> None:
        """Let the main thread have what another rank has sent."""
        self._reports.append(content)
        os.eventfd_write(self._event, 1)

    def take_reports(self) -> list[Any]:
        """Return what other ranks have sent since the last call."""
        new = []
        while self._reports:
            new.append(self._reports.popleft())
        return new

    def cancel_here(self, cause: str) -> None:
        """Call the evaluation off on this rank only."""
        if self.cause is None:
            self.cause = cause
            os.eventfd_write(self._event, 1)
