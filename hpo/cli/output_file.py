"""Files that a command writes with -o: new files, replaced files, pipes and devices."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from hpo.errors import RunError, UsageError
from hpo.store.run_dir import write_atomically


def check_output(output: Path | None, overwrite: bool) -> None:
    """Raise a UsageError where a file exists already, or where there is something that is neither file nor stream."""
    if output is None or not os.path.lexists(output) or _is_stream(output):
        return
    if output.exists() and not output.is_file():
        raise UsageError(f"-o {output}: it is no file: name a file, or a pipe")
    if not overwrite:
        raise UsageError(f"-o {output} exists: add --overwrite to replace it, or name another file")


def _is_stream(path: Path) -> bool:
    """Tell whether a path leads to a pipe, to a device such as a terminal, or to a file that a shell has opened."""
    if str(path.parent) == "/dev/fd" or str(path) in ("/dev/stdout", "/dev/stderr"):
        return True
    with suppress(OSError):
        mode = path.stat().st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def write_output(output: Path, content: bytes) -> None:
    """Write a file whole or not at all, or write to a stream, which stays in its place; raises RunError on failure."""
    if not _is_stream(output):
        write_atomically(output, content)
        return
    try:
        with output.open("ab") as stream:
            stream.write(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"{output} cannot be written: {error.strerror}") from error
