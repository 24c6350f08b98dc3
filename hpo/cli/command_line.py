"""Parse the values of options, and print a mistake in the command line as one message."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hpo.errors import ExitStatus, RunError, UsageError
from hpo.text_format import make_printable_lines

# Since 0.20, typer has its own copy of click, and used the real one before. Both have a class of this name.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

# Errors of standard output. `write_output` reports errors of files.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


def make_app(**options: Any) -> typer.Typer:
    """Return a typer app (command-line parser) without commands.

    Args:
        **options: Further arguments of typer.Typer.
    """
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def make_parser(convert: Callable[[str], Any], description: str) -> Callable[[str], Any]:
    """Return a function that parses the value of an option. Its error message contains the wrong value.

    Args:
        convert: Function that converts the text to a value. It must raise ValueError if the text is not valid.
        description: Noun phrase for valid values in the message, such as "a number".
    """

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise typer.BadParameter(f"must be {description}, got {text!r}") from None

    return parse


def _parse_seconds(given: str | float) -> float:
    """Convert a duration to seconds. It may be a number, numbers with units (1h30m), or H:M:S as in job scripts."""
    text = str(given)  # typer also parses defaults.
    if re.fullmatch(r"\d+(:\d\d){1,2}", text):
        parts = [int(part) for part in text.split(":")]
        return float(sum(part * 60**power for power, part in enumerate(reversed(parts))))
    if not re.fullmatch(r"(\d+(\.\d+)?[smhd]?)+", text):
        raise ValueError(text)
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)([smhd]?)", text))


parse_duration = make_parser(_parse_seconds, "a duration, such as 90, 90s, 10m, 1h30m, 2d or 1:30:00")
parse_duration_or_off = make_parser(
    lambda given: math.inf if given == "off" else _parse_seconds(given), "a duration, or off"
)
parse_whole_number = make_parser(int, "a whole number")
parse_number = make_parser(float, "a number")
parse_number_or_off = make_parser(lambda given: -math.inf if given == "off" else float(given), "a number, or off")


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a typer app. If the command line has a mistake, print it as one message to stderr.

    Args:
        program: The name of the program, for messages.
        arguments: The arguments of the command line.

    Returns:
        The exit status.
    """
    try:
        status = int(app(list(arguments), standalone_mode=False, prog_name=program) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (_ClickError, UsageError) as error:
        message = error.format_message() if isinstance(error, _ClickError) else str(error)
        print(
            f"error: {make_printable_lines(message).rstrip('.')}",
            *([] if isinstance(error, UsageError) else [f"(see {program} --help)"]),
            file=sys.stderr,
        )
        return ExitStatus.USAGE_ERROR
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.CRASHED
    except typer.Abort:  # Ctrl-C
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return ExitStatus.CRASHED
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        _discard_stdout()
        print(f"error: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        return ExitStatus.USAGE_ERROR


def _discard_stdout() -> None:
    # Otherwise, Python would try again at exit to write the output that could not be written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
