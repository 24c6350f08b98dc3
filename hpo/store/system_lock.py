"""The system's own locks of files, which it takes back from processes that die."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_system_lock(file: IO[Any], shared: bool = False) -> bool | None:
    """Lock an open file, until it is closed or this process has died; False where another process has locked it.

    None where it cannot be locked: not every file system has locks. Shared locks, for who only asks, do not keep each
    other out, and need no leave to write.
    """
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
