"""Take snapshots of the files below a folder. Two snapshots show which files an evaluation has written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_MAX_FILES = 20_000
_EXCLUDED_FOLDERS = ("__pycache__", ".git")

FileSnapshot = Mapping[str, tuple[int, int]]


def take_file_snapshot(folder: Path) -> FileSnapshot:
    """Return the size and the modification time of each file below a folder, by its relative path.

    Only the first 20,000 files are read.
    """
    snapshot: dict[str, tuple[int, int]] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _EXCLUDED_FOLDERS)
        for name in sorted(names):
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            snapshot[str(path.relative_to(folder))] = status.st_size, status.st_mtime_ns
            if len(snapshot) == _MAX_FILES:
                return snapshot
    return snapshot
