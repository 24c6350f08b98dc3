"""Processes that an objective forks: they are not the trainer, and must not go on as if they were."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from hpo.process.failure import traceback_of

# A scheduler sends them to all processes of a job; the supervisor decides what they mean.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_own = os.getpid()


def remember_process(ignored: tuple[signal.Signals, ...]) -> None:
    """Take this process for the trainer; processes that it forks do not ignore the signals that it ignores."""
    global _own
    _own = os.getpid()
    for number in ignored:
        signal.signal(number, _ignore)  # a handler, since what is ignored would stay so in programs that are started
    # A signal that comes before a forked process has let go of the handler is not to be lost.
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def let_go() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=let_go)


def _ignore(*_: object) -> None:
    pass


def is_forked() -> bool:
    """Tell whether an objective has forked this process."""
    return os.getpid() != _own


def end_if_forked(error: BaseException | None = None) -> None:
    """End this process, as Python would, if an objective has forked it and it has left the objective."""
    if not is_forked():
        return
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        print(traceback_of(error, []), end="", file=sys.stderr, flush=True)
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)
