"""Format values and durations for the user, and escape control characters."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_MAX_LISTED = 5
_LARGEST_WHOLE = 2**53  # A float64 cannot represent every whole number above it.
_LARGEST_PLAIN = 1e9  # A larger number is written with an exponent.
_MOST_DIGITS = 9  # significant digits, which are enough to distinguish any two float32 numbers


def format_number(value: float, digits: int = 4) -> str:
    """Return a number as text with `digits` significant digits.

    Whole numbers below 2**53 keep all their digits. Other numbers below 1e9 keep all digits before
    the point. Larger numbers have an exponent.
    """
    if abs(value) < _LARGEST_WHOLE and value == int(value):
        return str(int(value))
    return f"{value:.0f}" if 10**digits <= abs(value) < _LARGEST_PLAIN else f"{value:.{digits}g}"


def format_numbers(values: Sequence[float | None]) -> list[str]:
    """Return the numbers of a column as texts with 4 significant digits, or more to differ.

    The text of None is "".
    """
    different = {value for value in values if value is not None}
    digits = 4
    while digits < _MOST_DIGITS:
        if len({format_number(value, digits) for value in different}) == len(different):
            break
        digits += 1
    # One more digit shows the difference: 1.000003 and 1.000007 instead of 1 and 1.00001.
    digits += 4 < digits < _MOST_DIGITS
    return ["" if value is None else format_number(value, digits) for value in values]


def format_value(value: Any) -> str:
    """Return a hyperparameter's value as text."""
    return format_number(value) if isinstance(value, float) else make_printable(str(value))


def format_count(count: int, noun: str) -> str:
    """Return a count and a noun as text, such as ``1 rank`` or ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_named_values(values: Mapping[str, Any]) -> str:
    """Return named values as one line of text, such as ``depth=3  lr=0.1``."""
    texts = [f"{make_printable(name)}={format_value(item)}" for name, item in values.items()]
    return "  ".join(texts)


def cut_text(text: str, length: int = 160) -> str:
    """Return a text, cut to at most `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def format_repr(value: Any) -> str:
    """Return the `repr` of any value, cut to at most 160 characters."""
    try:
        return cut_text(repr(value))
    except RecursionError:
        return "nested too deeply"


def format_tenths(seconds: float | None) -> str:
    """Return a duration in seconds as text with one decimal; "?" if it is unknown."""
    return f"{seconds:.1f}" if seconds is not None and seconds >= 0 else "?"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text in its two largest units, such as ``2 h 05 min``.

    The text is "an unknown time" if the duration is NaN or negative. A duration is negative if the
    clock was changed.
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
    """Return a duration in seconds as text: 1:30, 2:01:30 or 1 d 02 h; "?" if it is unknown."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def format_date(seconds: float) -> str:
    """Return a time in seconds since the epoch as text in local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def make_show_command(run_dir: Path, label: str) -> str:
    """Return the `hpo show` command for an evaluation."""
    return f"hpo show {shlex.quote(str(run_dir))} {label}"


def escape_invisible(text: str, keep: str = "") -> str:
    """Escape characters that are not printable as `repr` does, except those in `keep`.

    Such characters could move the cursor of a terminal, or change the direction of text.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def make_printable(text: str) -> str:
    """Return a text as one line for a terminal, with spaces, and escaped control characters."""
    return escape_invisible("".join(" " if one.isspace() else one for one in text))


def split_printable_lines(text: str) -> list[str]:
    """Return the lines of a text for a terminal, with spaces for tabs and escaped controls."""
    lines = text.removesuffix("\n").split("\n")
    return [make_printable(line.expandtabs()).rstrip() for line in lines]


def make_printable_lines(text: str) -> str:
    """Return a text for a terminal, with spaces for tabs and escaped control characters."""
    return "\n".join(split_printable_lines(text))


def escape_unencodable(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, as in file names in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_error(error: BaseException) -> str:
    """Return the message of an exception as one line, even if its `__str__` fails."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return make_printable(text) or "no message"


def format_percent(share: float) -> str:
    """Return a share as a percentage with two significant digits."""
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.0f}%"


def format_list(items: Iterable[object], limit: int = _MAX_LISTED) -> str:
    """Return the items, separated by commas and "and". Only the first `limit` are listed."""
    texts = list(map(str, items))
    rest = len(texts) - limit
    texts = [*texts[:limit], f"{rest} more"] if rest > 0 else texts
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
