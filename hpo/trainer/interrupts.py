"""How a supervisor interrupts an objective: a signal, which raises an exception in the trainer's main thread."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.process.stacks import INTERRUPT


class Cancelled(BaseException):
    """Raised in an objective that is to end; not an Exception, so that ``except Exception`` does not catch it."""


class InterruptHandler:
    """Raises Cancelled in an objective when the supervisor asks for it, and acknowledges that it has done so."""

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self.allows_cancellation = False
        self._only_acknowledges = False
        self.is_cancel_requested = False

    def begin_evaluation(self) -> None:
        """Begin an evaluation."""
        self.is_cancel_requested = False
        signal.signal(INTERRUPT, self._on_signal)

    @contextmanager
    def allow_cancellation(self) -> Iterator[None]:
        """Let Cancelled be raised inside ``with``, in which only an objective may run."""
        try:
            self.allows_cancellation = True
            if self.is_cancel_requested:
                raise Cancelled
            yield
        finally:
            self.allows_cancellation = False

    @contextmanager
    def block_cancellation(self) -> Iterator[None]:
        """Do not raise Cancelled inside ``with``, in which an objective has called this program."""
        self.allows_cancellation = False
        try:
            yield
        finally:
            self.allows_cancellation = True

    @contextmanager
    def only_acknowledge(self) -> Iterator[None]:
        """Acknowledge requests inside ``with``, in which a program ends by itself, and let it end."""
        self._only_acknowledges = True
        try:
            yield
        finally:
            self._only_acknowledges = False

    def _on_signal(self, *_: object) -> None:
        """Raise Cancelled once in an evaluation: a supervisor repeats the signal until it is acknowledged."""
        is_first, self.is_cancel_requested = not self.is_cancel_requested, True
        if self._only_acknowledges:
            self._acknowledge()
        elif is_first and self.allows_cancellation:
            self._acknowledge()
            raise Cancelled
