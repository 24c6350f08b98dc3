"""The evaluation that a rank is in, as its watch sees it: it can be called off by any thread, at any moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpo.process import clock

# Go's runtime interrupts its threads with this signal for the same reasons: it does nothing to a process that does not
# expect it, and neither libraries nor debuggers care about it (golang.org/design/24543-non-cooperative-preemption).
INTERRUPT = signal.SIGURG

_SECONDS_BETWEEN_INTERRUPTS = 3.0  # for objectives that catch even BaseException


class CalledOff(BaseException):
    """Raised in an objective that is to end; no Exception, so that ``except Exception`` does not catch it."""


@dataclass(frozen=True)
class Details:
    """What a watch needs to know of an evaluation.

    `cut` ends the evaluation's connections, and may be called from any thread. An evaluation that still goes on after
    `overdue_after` seconds is called off. Where a process dies in it, `about` names the evaluation for a person, and on
    the leader, `give_up` records that it has failed: it is called with the failure in one line, and with the stack.
    """

    cut: Callable[[], None]
    overdue_after: float
    about: str
    give_up: Callable[[str, str], None] | None = None


class Watched:
    """An evaluation; `number` counts the worker's evaluations, and is the same on all its ranks.

    ``cause`` is why the evaluation was called off, None while it was not. An objective that is called off has
    `patience` seconds to end. `tell` tells the peers: it is called with `number` and the cause.
    """

    def __init__(self, number: int, details: Details, patience: float, tell: Callable[[int, str], None]) -> None:
        self.number = number
        self.details = details
        self.cause: str | None = None
        self._patience = patience
        self._tell = tell
        self._overdue_at = clock.now() + details.overdue_after
        self._called_off_at = self._interrupted_at = 0.0
        self._inside = False
        self._pressing = threading.Lock()

    # For the main thread

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let CalledOff be raised in the main thread inside ``with``, in which only an objective may run."""
        try:
            self._inside = True
            if self.cause is not None:
                raise CalledOff
            yield
        finally:
            self._inside = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Do not raise CalledOff inside ``with``, in which an objective has called this program."""
        self._inside = False
        try:
            yield
        finally:
            self._inside = True

    @property
    def is_inside(self) -> bool:
        """Whether the main thread is in the objective."""
        return self._inside

    @contextmanager
    def closing(self, patient: bool) -> Iterator[None]:
        """Let an objective clean up inside ``with``, as from `begin_closing` on."""
        self.begin_closing(patient)
        try:
            self._inside = True
            yield
        finally:
            self._inside = False

    def begin_closing(self, patient: bool) -> None:
        """Give an objective its `patience` seconds to clean up; if `patient`, without interrupts in their first half.

        If it has called this program, the caller raises CalledOff.
        """
        with self._pressing:
            self.cause = self.cause or "it is being closed"
            self._called_off_at = clock.now()
            self._interrupted_at = self._called_off_at + (self._patience / 2 if patient else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside ``with`` as the evaluation's."""
        left, self._overdue_at = self._overdue_at - clock.now(), float("inf")
        try:
            yield
        finally:
            self._overdue_at = clock.now() + left

    def call_off(self, cause: str) -> None:
        """Call the evaluation off on all ranks of the worker."""
        self.be_called_off(cause)
        self._tell(self.number, cause)

    def end(self) -> None:
        """End the evaluation, which has ended on all ranks; its connections are not cut any more when this returns."""
        with self._pressing:
            self._inside = False

    def interrupt(self) -> None:
        """Raise CalledOff if the main thread, which calls this, is in an objective that was called off."""
        if self._inside and self.cause is not None:
            raise CalledOff

    # For the watch's thread

    def be_called_off(self, cause: str) -> None:
        """Call the evaluation off on this rank only."""
        if self.cause is None:
            self._called_off_at, self._interrupted_at = clock.now(), float("-inf")
            self.cause = cause

    def is_overdue(self, now: float) -> bool:
        """Tell whether the evaluation has gone on for longer than it may, and has not been called off."""
        return now > self._overdue_at and self.cause is None

    def press(self, now: float) -> str:
        """Interrupt an objective that was called off; return why it is stuck once it had its time, "" before that."""
        with self._pressing:
            if self.cause is None or not self._inside:
                return ""
            if now > self._called_off_at + self._patience:
                when = f"its evaluation was called off {self._patience:g} s ago (--collective-timeout)"
                return f"it is stuck: {when}, because {self.cause}"
            if now > self._interrupted_at + _SECONDS_BETWEEN_INTERRUPTS:
                self._interrupted_at = now
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)
                self.details.cut()
            return ""
