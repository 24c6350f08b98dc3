"""Values that were found on disk: anybody may have written them, so they are checked before they are used."""

from __future__ import annotations

from collections.abc import Callable


def is_number(value: object) -> bool:
    """Tell whether a value is a number that fits into a float."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1023)


def is_whole_number(value: object) -> bool:
    """Tell whether a value is a whole number from 0."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: object) -> bool:
    """Tell whether a value is a text."""
    return type(value) is str


def is_mapping(value: object) -> bool:
    """Tell whether a value is a JSON object, with any names and values."""
    return type(value) is dict


def is_mapping_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a function that tells whether a value is a JSON object whose values all fit."""
    return lambda value: type(value) is dict and all(map(fits, value.values()))
