"""The standard streams of a rank: there even if they were closed, and used for warnings even if nobody reads them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from hpo.text_format import make_printable_lines


def fill_closed_streams() -> None:
    """Open a null device that cannot be written to in the place of each standard stream that was closed.

    Else the next file that is opened, a study for example, would get the descriptor of a closed stream, and what native
    libraries print would be written into it.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def warn(text: str) -> None:
    """Print a text on standard error.

    Errors are ignored: when mpirun is gone, nobody reads the text, and the rank still has to end its job.
    """
    with suppress(OSError, ValueError):  # it is closed, or nobody reads it
        print(make_printable_lines(text), file=sys.stderr, flush=True)
