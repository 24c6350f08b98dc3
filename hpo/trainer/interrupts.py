"""Interruption of an objective by its supervisor: a signal raises an exception in the trainer's main thread."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.process.stacks import INTERRUPT


class Cancelled(BaseException):
    """Ends an objective. It is not an Exception, so that ``except Exception`` does not catch it."""


class InterruptHandler:
    """Raises Cancelled in an objective when the supervisor requests it, and acknowledges the request."""

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self.allows_cancellation = False
        self._only_acknowledges = False
        self.is_cancel_requested = False

    def begin_evaluation(self) -> None:
        """Reset the handler, and register it for the signal."""
        self.is_cancel_requested = False
        signal.signal(INTERRUPT, self._on_signal)

    @contextmanager
    def allow_cancellation(self) -> Iterator[None]:
        """Return a context in which Cancelled may be raised; only the objective may run in it."""
        try:
            self.allows_cancellation = True
            if self.is_cancel_requested:
                raise Cancelled
            yield
        finally:
            self.allows_cancellation = False

    @contextmanager
    def block_cancellation(self) -> Iterator[None]:
        """Return a context in which Cancelled is not raised, for functions that the objective calls."""
        self.allows_cancellation = False
        try:
            yield
        finally:
            self.allows_cancellation = True

    @contextmanager
    def only_acknowledge(self) -> Iterator[None]:
        """Return a context in which requests are only acknowledged, since a program is ending by itself."""
        self._only_acknowledges = True
        try:
            yield
        finally:
            self._only_acknowledges = False

    def _on_signal(self, *_: object) -> None:
        """Raise Cancelled once per evaluation; the supervisor repeats the signal until it is acknowledged."""
        is_first, self.is_cancel_requested = not self.is_cancel_requested, True
        if self._only_acknowledges:
            self._acknowledge()
        elif is_first and self.allows_cancellation:
            self._acknowledge()
            raise Cancelled
