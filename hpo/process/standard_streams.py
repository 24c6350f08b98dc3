"""Make the standard streams of a rank safe, even if they were closed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from hpo.text_format import make_printable_lines


def fill_closed_streams() -> None:
    """Open a null device for each standard stream that was closed.

    Otherwise the next file that is opened, for example a study, gets the descriptor of a closed
    stream. Native libraries would then print into that file.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def warn(text: str) -> None:
    """Print a text on standard error, and ignore errors.

    If mpirun has ended, no process reads the text. The rank must still end its job.
    """
    with suppress(OSError, ValueError):  # It may be closed, or a pipe without a reader.
        print(make_printable_lines(text), file=sys.stderr, flush=True)
