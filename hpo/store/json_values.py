"""Check the types of values that were read from JSON files."""

from __future__ import annotations

from collections.abc import Callable


def is_number(value: object) -> bool:
    """Return whether a value is a number that fits into a float."""
    return type(value) is float or (type(value) is int and abs(value) < 2**1023)


def is_whole_number(value: object) -> bool:
    """Return whether a value is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: object) -> bool:
    """Return whether a value is a string."""
    return type(value) is str


def is_mapping(value: object) -> bool:
    """Return whether a value is a JSON object."""
    return type(value) is dict


def is_mapping_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a function that accepts a JSON object if `fits` accepts each of its values."""
    return lambda value: type(value) is dict and all(map(fits, value.values()))


def is_list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a function that accepts a JSON list if `fits` accepts each of its items."""
    return lambda value: type(value) is list and all(map(fits, value))
