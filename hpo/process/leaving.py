"""How a process of a job ends: when the job does, with its status, whatever objectives call or have left behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from hpo.process.failure import traceback_of
from hpo.process.printed import warn

_SECONDS_TO_END = 5.0

_own = os.getpid()

end_now = os._exit  # the real one: `refusing` replaces os._exit while objectives run


@contextmanager
def refusing(refuse: Callable[[int], None]) -> Iterator[None]:
    """Call `refuse` with the status where os._exit is called inside ``with``; forked processes end with that status.

    If a rank ended by os._exit(0), its MPI job would seem to have ended well.
    """

    def ends(status: int) -> NoReturn:
        if os.getpid() == _own:
            refuse(status)
        end_now(status)

    os._exit = ends
    try:
        yield
    finally:
        os._exit = end_now


def is_forked() -> bool:
    """Tell whether an objective has forked this process, which then is no rank."""
    return os.getpid() != _own


def end_if_forked(error: BaseException | None = None) -> None:
    """End this process, as Python would, where an objective has forked it and it has left the objective.

    A forked process is no rank.
    """
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
    end_now(status)


def leave(status: int, speaks: bool) -> NoReturn:
    """End this process as Python does, but within a few seconds.

    Python waits for threads and processes that objectives have left, for ever where they are blocked. If this process
    `speaks`, it prints a warning where it ends without them.
    """
    threading.Thread(target=_end_late, args=(status, speaks), daemon=True).start()
    sys.exit(status)


def _end_late(status: int, speaks: bool) -> None:
    time.sleep(_SECONDS_TO_END)
    if speaks:
        main = threading.main_thread()
        left = [thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main)]
        which = f" ({', '.join(sorted(left)[:3])})" if left else ""
        warn(f"warning: threads or processes that objectives have left do not end{which}: the job ends without them")
    for child in multiprocessing.active_children():
        child.kill()  # mpirun waits for all processes that may still print
    end_now(status)


def is_alive(process: int) -> bool:
    """Tell whether there is a process of this number on this host."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
