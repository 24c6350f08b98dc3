"""The evaluation that a rank runs, as the watch (thread that handles signals and messages) over the rank sees it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class WatchedEvaluation:
    """An evaluation that any thread can cancel. The main thread waits for a cancellation as for data in a file.

    Args:
        number: Number of the evaluation, counted over the evaluations of the worker. It is the same on all ranks of the
            worker.
        event: File descriptor of the rank's eventfd (counter of Linux that wakes a waiting thread).
        notify_peers: Called with `number` and the cause to cancel the evaluation on the other ranks.
        notify_leader: Called with `number` and a report for the leader.

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
        """Return the file descriptor to wait on. It is readable after a cancellation or a report."""
        return self._event

    def clear_event(self) -> None:
        """Acknowledge a cancellation or reports, so that the file descriptor is not readable until the next event."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def cancel_on_all(self, cause: str) -> None:
        """Cancel the evaluation on all ranks of the worker, including this rank."""
        self.cancel_here(cause)
        self._notify_peers(self.number, cause)

    def send_report(self, content: Any) -> None:
        """Send a report to the worker's leader, where `take_reports` returns it."""
        self._notify_leader(self.number, content)

    def add_report(self, content: Any) -> None:
        """Add a report that has arrived from another rank, and wake the main thread."""
        self._reports.append(content)
        os.eventfd_write(self._event, 1)

    def take_reports(self) -> list[Any]:
        """Return the reports that have arrived from other ranks since the previous call."""
        new = []
        while self._reports:
            new.append(self._reports.popleft())
        return new

    def cancel_here(self, cause: str) -> None:
        """Cancel the evaluation on this rank only."""
        if self.cause is None:
            self.cause = cause
            os.eventfd_write(self._event, 1)
