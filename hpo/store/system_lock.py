"""Lock files with locks of the operating system, which are released when their process ends."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_system_lock(file: IO[Any], shared: bool = False) -> bool | None:
    """Lock an open file until it is closed or the process ends, without waiting.

    Args:
        file: File that is open for writing, or for reading if `shared`.
        shared: Whether to take a shared lock, which several processes can hold. It serves to find out whether another
            process holds a lock that is not shared.

    Returns:
        True if the file is locked now, False if another process holds the lock, and None if the file system has no
        locks.
    """
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
