"""Cancel an objective by a signal of the supervisor, which raises an exception in the main thread of the trainer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.process.user_frames import INTERRUPT


class Cancelled(BaseException):
    """Raised in an objective to end it. It is not an Exception, so that ``except Exception`` does not catch it."""


class InterruptHandler:
    """Raises Cancelled in an objective when the supervisor requests it, and confirms that by `acknowledge`."""

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self.allows_cancellation = False
        self._only_acknowledges = False
        self.is_cancel_requested = False

    def begin_evaluation(self) -> None:
        """Forget the requests of earlier evaluations, and register this handler for the signal."""
        self.is_cancel_requested = False
        signal.signal(INTERRUPT, self._on_signal)

    @contextmanager
    def allow_cancellation(self) -> Iterator[None]:
        """Return a context in which Cancelled may be raised: in the objective, and in waits for other trainers."""
        try:
            self.allows_cancellation = True
            if self.is_cancel_requested:
                raise Cancelled
            yield
        finally:
            self.allows_cancellation = False

    @contextmanager
    def block_cancellation(self) -> Iterator[None]:
        """Return a context in which Cancelled is not raised. Functions of hpo that an objective calls use it."""
        self.allows_cancellation = False
        try:
            yield
        finally:
            self.allows_cancellation = True

    @contextmanager
    def only_acknowledge(self) -> Iterator[None]:
        """Return a context in which requests are acknowledged, but Cancelled is not raised.

        It is for a program that has finished its work and is about to exit.
        """
        self._only_acknowledges = True
        try:
            yield
        finally:
            self._only_acknowledges = False

    def _on_signal(self, *_: object) -> None:
        """Raise Cancelled if the context allows it, and only once per evaluation.

        The supervisor repeats the signal until it is acknowledged.
        """
        is_first = not self.is_cancel_requested
        self.is_cancel_requested = True
        if self._only_acknowledges:
            self._acknowledge()
        elif is_first and self.allows_cancellation:
            self._acknowledge()
            raise Cancelled
