"""Texts that people see: values and durations, short and aligned, and nothing that a terminal would act upon."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

_LARGEST_WHOLE = 2**53  # from here on, not every whole number is a float


def number(value: float) -> str:
    """Write a number with four significant digits, or all digits if it is whole."""
    if abs(value) < _LARGEST_WHOLE and value == int(value):
        return str(int(value))
    return f"{value:.4g}"


def value(value: Any) -> str:
    """Write a hyperparameter's value."""
    return number(value) if isinstance(value, float) else printable(str(value))


def counted(count: int, noun: str) -> str:
    """Write a number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def named(values: Mapping[str, Any]) -> str:
    """Write named values in one line."""
    return "  ".join(f"{printable(name)}={value(item)}" for name, item in values.items())


def short(text: str, length: int = 160) -> str:
    """Cut a text that is too long for a line."""
    return text if len(text) <= length else text[: length - 3] + "..."


def quoted(value: Any) -> str:
    """Write any value as Python does, in at most 160 characters."""
    try:
        return short(repr(value))
    except RecursionError:
        return "nested too deeply"


def tenths(seconds: float | None) -> str:
    """Write a duration in seconds; "?" where it is not known."""
    return f"{seconds:.1f}" if seconds is not None and seconds >= 0 else "?"


def duration(seconds: float) -> str:
    """Write a duration in its two largest units; one between two times of a clock that was set may not be known."""
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


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds, with hours or days where there are any; "?" where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def day(seconds: float) -> str:
    """Write a moment in local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def show_command(run_dir: Path, label: str) -> str:
    """Write the command line that shows everything about an evaluation."""
    return f"hpo show {shlex.quote(str(run_dir))} {label}"


def escaped(text: str, keep: str = "") -> str:
    """Escape, as Python does, all that is no visible character: it could move the cursor, or turn the line around."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def printable(text: str) -> str:
    """Write a text in one line of a terminal: whatever separates words or lines as a space, and the rest escaped."""
    return escaped("".join(" " if character.isspace() else character for character in text))


def printable_lines(text: str) -> list[str]:
    """Take a text apart into its lines, each as `printable` writes it."""
    return [printable(line.expandtabs()).rstrip() for line in text.removesuffix("\n").split("\n")]


def printable_text(text: str) -> str:
    """Write a text of several lines, each as `printable` writes it."""
    return "\n".join(printable_lines(text))


def showable(text: str) -> str:
    """Escape what UTF-8 has no bytes for, such as the parts of a file name in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


def message(error: BaseException) -> str:
    """Return an exception's message in one line that any terminal can show; its own code may fail."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return printable(text) or "no message"
