"""Handle processes that an objective forks, such as the loader processes of a DataLoader.

Such a process is a copy of the trainer. It must end when it leaves the objective; otherwise it
would continue as a second trainer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from hpo.process.failure import format_traceback

# A scheduler sends these signals to all processes of a job, but only the supervisor reacts to them.
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
        signal.signal(number, _ignore_signal)
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


def _ignore_signal(*_: object) -> None:
    pass


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
