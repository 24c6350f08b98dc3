"""Texts that people see: values and durations, short and aligned, and nothing that a terminal would act upon."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_LARGEST_WHOLE = 2**53  # from here on, not every whole number is a float
_LARGEST_PLAIN = 1e9  # absolute value of a number that is written without an exponent
_MOST_DIGITS = 9  # significant ones; they tell any two float32 apart


def format_number(value: float, digits: int = 4) -> str:
    """Return a number as text, with `digits` significant digits, or with all digits before the point if there are more.

    A number of 1e9 or more has an exponent, unless it is whole.
    """
    if abs(value) < _LARGEST_WHOLE and value == int(value):
        return str(int(value))
    return f"{value:.0f}" if 10**digits <= abs(value) < _LARGEST_PLAIN else f"{value:.{digits}g}"


def format_numbers(values: Sequence[float | None]) -> list[str]:
    """Return the numbers of a column as texts with four significant digits, or enough to tell different ones apart.

    The text of None is empty.
    """
    different, digits = {value for value in values if value is not None}, 4
    while digits < _MOST_DIGITS and len({format_number(value, digits) for value in different}) < len(different):
        digits += 1
    # One more digit shows by how much they differ: 1.000003 and 1.000007, and not 1 and 1.00001.
    digits += 4 < digits < _MOST_DIGITS
    return ["" if value is None else format_number(value, digits) for value in values]


def format_value(value: Any) -> str:
    """Return a hyperparameter's value as text."""
    return format_number(value) if isinstance(value, float) else make_printable(str(value))


def format_count(count: int, noun: str) -> str:
    """Return a number of things as text, such as ``1 rank`` or ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_named_values(values: Mapping[str, Any]) -> str:
    """Return named values as one line of text."""
    return "  ".join(f"{make_printable(name)}={format_value(item)}" for name, item in values.items())


def cut_text(text: str, length: int = 160) -> str:
    """Return a text, cut where it is longer than `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def format_repr(value: Any) -> str:
    """Return any value as `repr` writes it, in at most 160 characters."""
    try:
        return cut_text(repr(value))
    except RecursionError:
        return "nested too deeply"


def format_tenths(seconds: float | None) -> str:
    """Return a duration as text, in seconds with one decimal; "?" where it is not known."""
    return f"{seconds:.1f}" if seconds is not None and seconds >= 0 else "?"


def format_duration(seconds: float) -> str:
    """Return a duration, given in seconds, as text in its two largest units.

    It is "an unknown time" where it is NaN, or negative, since the clock was set between its two ends.
    """
    if not seconds >= 0:
        return "an unknown time"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def format_clock(seconds: float) -> str:
    """Return a duration, given in seconds, as text such as 1:30, 2:01:30 or 1 d 02 h; "?" where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_date(seconds: float) -> str:
    """Return a moment, given in seconds since the epoch, as text in local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def make_show_command(run_dir: Path, label: str) -> str:
    """Return the command line that shows everything about an evaluation."""
    return f"hpo show {shlex.quote(str(run_dir))} {label}"


def escape_invisible(text: str, keep: str = "") -> str:
    """Return a text with all invisible characters escaped, as Python does, but for those to `keep`.

    They could move the cursor, or change the direction of writing.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def make_printable(text: str) -> str:
    """Return a text as one line for a terminal: white space as spaces, other invisible characters escaped."""
    return escape_invisible("".join(" " if character.isspace() else character for character in text))


def split_printable_lines(text: str) -> list[str]:
    """Return the lines of a text, each as `printable` returns it."""
    return [make_printable(line.expandtabs()).rstrip() for line in text.removesuffix("\n").split("\n")]


def make_printable_lines(text: str) -> str:
    """Return a text of several lines, each as `printable` returns it."""
    return "\n".join(split_printable_lines(text))


def escape_unencodable(text: str) -> str:
    """Return a text with all that UTF-8 cannot encode escaped, such as parts of a file name in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_error(error: BaseException) -> str:
    """Return an exception's message as one line for any terminal, even where the exception's own code fails."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return make_printable(text) or "no message"
