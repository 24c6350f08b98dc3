"""Parse the values of options, and print a mistake in the command line as one message."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from hpo.errors import ExitStatus, RunError, UsageError
from hpo.options import DURATION, WHOLE, Kind
from hpo.text_format import make_printable_lines

T = TypeVar("T")

# Since 0.20, typer has its own copy of click, and used the real one before. Both have a class of
# this name.
_ClickError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

# Errors of standard output. `hpo.cli.commands` reports errors of files.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)


def make_app() -> typer.Typer:
    """Return a typer app without commands."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def make_parser(kind: Kind) -> Callable[[str], Any]:
    """Return a function that parses the value of an option, with a message for a wrong one."""

    def parse(text: str) -> Any:
        if text == "off" and kind.off is not None:
            return kind.off
        try:
            return kind.parse(text) if kind.parse is not None else text
        except ValueError:
            raise typer.BadParameter(f"must be {kind.noun}, got {text!r}") from None

    return parse


def make_count_option(help_text: str, *flags: str) -> Any:
    """Return the annotation of an option whose value is a whole number."""
    return typer.Option(*flags, metavar="N", parser=make_parser(WHOLE), help=help_text)


parse_duration = make_parser(DURATION)


def run_command(run: Callable[[], T], program: str) -> T | int:
    """Return what a function returns; after a mistake, print one message and return the status."""
    try:
        result = run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return result
    except (_ClickError, UsageError) as error:
        message = str(error)
        hint = ""
        if isinstance(error, _ClickError):
            message = error.format_message()
            context: Any = getattr(error, "ctx", None)
            hint = f" (see {context.command_path if context else program} --help)"
        print(f"error: {make_printable_lines(message).rstrip('.')}{hint}", file=sys.stderr)
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


def call_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> Any:
    """Parse a command line, and return what its command returns; an exit status after `--help`."""
    return app(list(arguments), standalone_mode=False, prog_name=program)


def _discard_stdout() -> None:
    # Otherwise, Python would try again at exit to write the output that could not be written.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
