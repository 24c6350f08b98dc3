"""What the command lines of run_islands.py and hpo have in common: how values are read, and what a mistake prints."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hpo.errors import Exit, RunError, UsageError
from hpo.text import printable_text

# typer brings its own copy of click since 0.20, and used the real one before: this is its base class in both.
_Mistake: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

# Files have messages of their own: see write_whole.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


def new_app(**options: Any) -> typer.Typer:
    """Make an empty typer app."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def parser(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    """Return a parser for values of a kind; its message shows a wrong value, which typer's own does not."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {name}") from None

    return parse


def _seconds(given: str | float) -> float:
    """Return the seconds of a duration: a number, numbers with units, or H:M:S as schedulers write it."""
    text = str(given)  # typer parses defaults too
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        parts = [int(part) for part in text.split(":")]
        return float(sum(part * 60**place for place, part in enumerate(reversed(parts))))
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd]?)+", text):
        raise ValueError(text)
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smhd]?)", text))


duration = parser(_seconds, "a duration, such as 90, 90s, 10m, 1h30m, 2d or 1:30:00")
duration_or_off = parser(lambda given: math.inf if given == "off" else _seconds(given), "a duration, or off")
whole = parser(int, "a whole number")
number = parser(float, "a number")
number_or_off = parser(lambda given: -math.inf if given == "off" else float(given), "a number, or off")


def call(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a typer app on the arguments of a command line and return its exit status; a mistake is one line on stderr.

    A standard output that cannot be written is a mistake too, unless it is a pipe that its reader has closed.
    """
    try:
        status = int(app(list(arguments), standalone_mode=False, prog_name=program) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (_Mistake, UsageError) as error:
        message = error.format_message() if isinstance(error, _Mistake) else str(error)
        print(
            f"error: {printable_text(message).rstrip('.')}",
            *([] if isinstance(error, UsageError) else [f"(see {program} --help)"]),
            file=sys.stderr,
        )
        return Exit.MISTAKE
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.CRASHED
    except typer.Abort:  # Ctrl-C
        return Exit.CUT_SHORT
    except BrokenPipeError:
        _write_no_more()
        return Exit.CRASHED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _write_no_more()
        print(f"error: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        return Exit.MISTAKE


def _write_no_more() -> None:
    """Keep Python from trying again, when it ends, to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
