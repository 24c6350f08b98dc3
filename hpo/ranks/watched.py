"""The evaluation that a rank supervises, as its watch knows it: any thread may call it off, at any moment."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Watched:
    """An evaluation; `number` counts the worker's evaluations, and is the same on all its ranks.

    ``cause`` is why the evaluation was called off, None while it was not. `tell` tells the peers: it is called with
    `number` and the cause; `tell_leader` sends something to the worker's leader. The main thread can wait for a
    call-off, or for what others have sent, together with other files, by the rank's `event`.
    """

    def __init__(
        self, number: int, event: int, tell: Callable[[int, str], None], tell_leader: Callable[[int, Any], None]
    ) -> None:
        self.number = number
        self.cause: str | None = None
        self._tell = tell
        self._tell_leader = tell_leader
        self._reports: deque[Any] = deque()
        self._event = event
        self.clear()

    def fileno(self) -> int:
        """Return the descriptor to wait for; it can be read from the call-off until `clear`."""
        return self._event

    def clear(self) -> None:
        """Take note of a call-off, or of what others have sent."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def call_off(self, cause: str) -> None:
        """Call the evaluation off on all ranks of the worker."""
        self.be_called_off(cause)
        self._tell(self.number, cause)

    def report(self, content: Any) -> None:
        """Send something to the worker's leader, which gets it by `take_reports`."""
        self._tell_leader(self.number, content)

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

    def be_called_off(self, cause: str) -> None:
        """Call the evaluation off on this rank only."""
        if self.cause is None:
            self.cause = cause
            os.eventfd_write(self._event, 1)
