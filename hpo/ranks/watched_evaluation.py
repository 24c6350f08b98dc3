"""The evaluation that a rank supervises, as the watch over the rank sees it: any thread may cancel it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class WatchedEvaluation:
    """An evaluation that can be cancelled from any thread. The main thread waits on it as on a file.

    Args:
        number: Number of the evaluation among those of the worker, the same on all its ranks.
        event: File descriptor of the rank's eventfd.
        notify_peers: Called with `number` and the cause to cancel the evaluation on the other ranks.
        notify_leader: Called with `number` and a report for the worker's leader.

    Attributes:
        cause: Why the evaluation was cancelled; None if it was not.
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
        """Return the file descriptor to wait on; it is readable from a cancellation until `clear_event`."""
        return self._event

    def clear_event(self) -> None:
        """Acknowledge a cancellation, or reports of other ranks."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def cancel_on_all(self, cause: str) -> None:
        """Cancel the evaluation on all ranks of the worker."""
        self.cancel_here(cause)
        self._notify_peers(self.number, cause)

    def send_report(self, content: Any) -> None:
        """Send a report to the worker's leader, which gets it by `take_reports`."""
        self._notify_leader(self.number, content)

    def add_report(self, content: Any) -> None:
        """Add a report of another rank for the main thread."""
        self._reports.append(content)
        os.eventfd_write(self._event, 1)

    def take_reports(self) -> list[Any]:
        """Return the reports of other ranks since the last call."""
        new = []
        while self._reports:
            new.append(self._reports.popleft())
        return new

    def cancel_here(self, cause: str) -> None:
        """Cancel the evaluation on this rank only."""
        if self.cause is None:
            self.cause = cause
            os.eventfd_write(self._event, 1)
