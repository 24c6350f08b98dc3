"""Make the standard streams of a rank safe, even if they were closed."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

from hpo.text_format import make_printable_lines


def fill_closed_streams() -> None:
    """Open a null device for each standard stream that was closed.

    Otherwise the next file that is opened, for example a study, gets the descriptor of a closed
    stream. Native libraries would then print into that file.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


_result_descriptor = 1


def divert_output() -> None:
    """Let all that this process prints go to standard error, except the result (`print_result`)."""
    global _result_descriptor
    _result_descriptor = os.dup(1)
    os.dup2(2, 1)


def print_result(content: Any) -> None:
    """Print the result of a command as JSON to standard output."""
    sys.stdout.flush()
    with open(_result_descriptor, "w", closefd=False) as file:
        file.write(json.dumps(content, indent=2) + "\n")


def warn(text: str) -> None:
    """Print a text on standard error, and ignore errors.

    If mpirun has ended, no process reads the text. The rank must still end its job.
    """
    with suppress(OSError, ValueError):  # It may be closed, or a pipe without a reader.
        print(make_printable_lines(text), file=sys.stderr, flush=True)
