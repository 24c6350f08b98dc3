"""The evaluation that a rank supervises, as its watch knows it: any thread may call it off, at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress


class Watched:
    """An evaluation; `number` counts the worker's evaluations, and is the same on all its ranks.

    ``cause`` is why the evaluation was called off, None while it was not. `tell` tells the peers: it is called with
    `number` and the cause. The main thread can wait for a call-off together with other files, by the rank's `event`.
    """

    def __init__(self, number: int, event: int, tell: Callable[[int, str], None]) -> None:
        self.number = number
        self.cause: str | None = None
        self._tell = tell
        self._event = event
        self.clear()

    def fileno(self) -> int:
        """Return the descriptor to wait for; it can be read from the call-off until `clear`."""
        return self._event

    def clear(self) -> None:
        """Take note of a call-off."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def call_off(self, cause: str) -> None:
        """Call the evaluation off on all ranks of the worker."""
        self.be_called_off(cause)
        self._tell(self.number, cause)

    def be_called_off(self, cause: str) -> None:
        """Call the evaluation off on this rank only."""
        if self.cause is None:
            self.cause = cause
            os.eventfd_write(self._event, 1)
