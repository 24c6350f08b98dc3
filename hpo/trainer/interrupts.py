"""How a supervisor interrupts an objective: a signal, which raises an exception in the trainer's main thread."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.process.stacks import INTERRUPT


class Cancelled(BaseException):
    """Raised in an objective that is to end; not an Exception, so that ``except Exception`` does not catch it."""


class Interrupts:
    """Raises Cancelled in an objective when the supervisor asks for it, and acknowledges that it has done so."""

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self.is_inside = False
        self._is_ending = False
        self.was_requested = False

    def begin(self) -> None:
        """Begin an evaluation."""
        self.was_requested = False
        signal.signal(INTERRUPT, self._on_signal)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let Cancelled be raised inside ``with``, in which only an objective may run."""
        try:
            self.is_inside = True
            if self.was_requested:
                raise Cancelled
            yield
        finally:
            self.is_inside = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Do not raise Cancelled inside ``with``, in which an objective has called this program."""
        self.is_inside = False
        try:
            yield
        finally:
            self.is_inside = True

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Acknowledge requests inside ``with``, in which a program ends by itself, and let it end."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    def _on_signal(self, *_: object) -> None:
        """Raise Cancelled once in an evaluation: a supervisor repeats the signal until it is acknowledged."""
        is_first, self.was_requested = not self.was_requested, True
        if self._is_ending:
            self._acknowledge()
        elif is_first and self.is_inside:
            self._acknowledge()
            raise Cancelled
