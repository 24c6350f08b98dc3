"""Write the output of a command to the path given by -o: a new file, an existing file, a pipe or a device."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from hpo.errors import RunError, UsageError
from hpo.store.run_dir import write_atomically


def check_output(output: Path | None, overwrite: bool) -> None:
    """Check that the path of an output file may be written to.

    Args:
        output: The path that the user has given; None if the user has given none.
        overwrite: Whether an existing file may be replaced.

    Raises:
        UsageError: The file exists and must not be replaced, or the path is a directory.
    """
    if output is None or not os.path.lexists(output) or _is_stream(output):
        return
    if output.exists() and not output.is_file():
        raise UsageError(f"-o must be a file or a pipe, got '{output}'")
    if not overwrite:
        raise UsageError(f"-o {output} exists. Add --overwrite to replace it, or name another file")


def _is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, a device such as a terminal, or an open file of this process (/dev/stdout)."""
    if str(path.parent) == "/dev/fd" or str(path) in ("/dev/stdout", "/dev/stderr"):
        return True
    with suppress(OSError):
        mode = path.stat().st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def write_output(output: Path, content: bytes) -> None:
    """Write a file atomically, or write to a pipe or device.

    Args:
        output: The path of the file, pipe or device.
        content: The bytes to write.

    Raises:
        RunError: The path cannot be written to.
    """
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
