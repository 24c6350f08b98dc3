"""The operating system's locks of files, which it releases when their process dies."""

from __future__ import annotations

import fcntl
from typing import IO, Any


def try_system_lock(file: IO[Any], shared: bool = False) -> bool | None:
    """Lock an open file, until it is closed or this process has died, and return true.

    Returns false where another process has locked the file, and None where it cannot be locked: not every file system
    has locks. A shared lock only finds out whether the file is locked: such locks do not exclude each other, and need
    no permission to write.
    """
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True
