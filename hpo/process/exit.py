"""How a rank ends: when its job does, with the job's status, whatever threads are left."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NoReturn

_SECONDS_TO_EXIT = 5.0


def exit_process(status: int) -> NoReturn:
    """End this process as Python does, but within a few seconds: libraries may have left threads that do not end."""
    threading.Thread(target=_exit_late, args=(status,), daemon=True).start()
    sys.exit(status)


def _exit_late(status: int) -> None:
    time.sleep(_SECONDS_TO_EXIT)
    os._exit(status)


def is_alive(process: int) -> bool:
    """Tell whether there is a process of this number on this host."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
