"""Delay file operations as a parallel file system does: 1 to 10 ms each on Lustre, GPFS and NFS."""

from __future__ import annotations

import os
from pathlib import Path

# Each Python process imports sitecustomize.py at its start.
_CODE = """
import os, time

def slow(function, applies=lambda *_, **__: True):
    def slowed(*arguments, **options):
        if applies(*arguments, **options):
            time.sleep({seconds})
        return function(*arguments, **options)
    return slowed

os.open = slow(os.open, lambda path, flags, *_, **__: flags & os.O_EXCL)
for name in ("fsync", "symlink", "link", "rename", "replace", "unlink"):
    setattr(os, name, slow(getattr(os, name)))
"""


def slow_files(folder: Path, seconds: float, path: str = "") -> dict[str, str]:
    """Return environment variables that delay each fsync, exclusive create, rename and unlink.

    Args:
        folder: Folder to which the code that adds the delay is written.
        seconds: Delay of each operation.
        path: Further entries of PYTHONPATH.
    """
    (folder / "sitecustomize.py").write_text(_CODE.format(seconds=seconds))
    return {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(folder), path, os.environ.get("PYTHONPATH")])
        )
    }
