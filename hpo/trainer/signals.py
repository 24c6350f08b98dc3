"""Signals of a trainer, and processes that an objective forks.

A scheduler signals all processes of a job, but only the supervisor reacts. It cancels an objective
by a signal, which raises an exception in the trainer's main thread. A process that an objective
forks, such as a loader process of a DataLoader, is a copy of the trainer. It must end when it
leaves the objective; otherwise it would continue as a second trainer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hpo.process.failure import format_traceback
from hpo.process.user_frames import INTERRUPT

# The signals of a scheduler.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_trainer_pid = os.getpid()


def register_trainer_process(ignored: tuple[signal.Signals, ...]) -> None:
    """Register this process as the trainer, and let it ignore the signals `ignored`.

    Processes that it forks do not ignore these signals.
    """
    global _trainer_pid
    _trainer_pid = os.getpid()
    for number in ignored:
        # Programs would inherit SIG_IGN, but do not inherit a handler.
        signal.signal(number, lambda *_: None)
    # Blocked signals are not lost if they arrive before a forked process has reset the handler.
    masks = threading.local()

    def block_signals() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)

    def restore_mask() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def reset_handlers() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        restore_mask()

    os.register_at_fork(
        before=block_signals, after_in_parent=restore_mask, after_in_child=reset_handlers
    )


def is_forked() -> bool:
    """Return whether an objective has forked this process. If not, this process is the trainer."""
    return os.getpid() != _trainer_pid


def end_if_forked(error: BaseException | None = None) -> None:
    """End this process if an objective has forked it; do nothing in the trainer.

    Call it when the objective has returned, or has raised `error`. The process ends with the exit
    status that a Python program would have.
    """
    if not is_forked():
        return
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        print(format_traceback(error, []), end="", file=sys.stderr, flush=True)
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


class Cancelled(BaseException):
    """Raised in an objective to end it. ``except Exception`` does not catch it."""


class InterruptHandler:
    """Raises Cancelled at the supervisor's request, and confirms that by `acknowledge`."""

    def __init__(self, acknowledge: Callable[[], None]) -> None:
        self._acknowledge = acknowledge
        self.allows_cancellation = False
        self._only_acknowledges = False
        self.is_cancel_requested = False
        signal.signal(INTERRUPT, self._on_signal)

    def begin_evaluation(self) -> None:
        """Forget the requests of earlier evaluations."""
        self.is_cancel_requested = False

    @contextmanager
    def allow_cancellation(self) -> Iterator[None]:
        """Return a context for the objective, and for waits for other trainers."""
        try:
            self.allows_cancellation = True
            if self.is_cancel_requested:
                raise Cancelled
            yield
        finally:
            self.allows_cancellation = False

    @contextmanager
    def block_cancellation(self) -> Iterator[None]:
        """Return a context for functions of hpo that an objective calls."""
        self.allows_cancellation = False
        try:
            yield
        finally:
            self.allows_cancellation = True

    @contextmanager
    def only_acknowledge(self) -> Iterator[None]:
        """Return a context for a program that is about to exit: requests are acknowledged only."""
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
