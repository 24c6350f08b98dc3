"""Plain Python values in the place of what people write: numpy's numbers, numbers in quotes, long fractions, lists."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

Parameter = TypeVar("Parameter")

_LARGEST_FLOAT = sys.float_info.max
_LARGEST_WHOLE = 2**53  # above, not all integers are floats
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_MOST_CHOICES = 100  # more choices than anybody writes one by one


# exp(log(x)) is off by some 1e-13 at worst in the range of float64; 12 digits absorb that, so that decoding an encoded
# value returns it unchanged. Two individuals are different if they differ in these digits.
_SIGNIFICANT_DIGITS = 12


def round_float(value: float) -> float:
    """Round to the digits that values have."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def round_inwards(value: float, inside: float) -> float:
    """Round to `_DIGITS` digits, towards `inside` where rounding would leave the range."""
    rounded = round_float(value)
    if (rounded - value) * (inside - value) >= 0 or rounded == value:
        return rounded
    step = 10.0 ** (math.floor(math.log10(abs(value))) - _SIGNIFICANT_DIGITS + 1)
    return round_float(rounded + math.copysign(step, inside - value))


def find_wrong_bounds(low: float, high: float) -> str:
    """Return what is wrong with the bounds of a Float, empty if nothing is."""
    if not all(-_LARGEST_FLOAT <= bound <= _LARGEST_FLOAT for bound in (low, high)):
        return "the bounds of a Float must be finite"
    if not math.isfinite(float(high) - float(low)):
        return f"the bounds of a Float must be at most {_LARGEST_FLOAT:.1e} apart"
    return "" if low < high else "low < high must hold, in 12 significant digits"


def format_parameter(parameter: Any) -> str:
    """Return a parameter as a search file has it; its `repr` leaves out `mutable`, which may change on a resume."""
    return repr(parameter) if parameter.mutable is False else f"{repr(parameter)[:-1]}, mutable={parameter.mutable!r})"


def correct_parameter(parameter: Parameter) -> Parameter | None:
    """Return the valid parameter that a user meant by a parameter with wrong values; None if there is none."""
    given: Any = parameter
    mutable = _BOOLEANS.get(str(given.mutable).lower())
    if mutable is None:
        return None
    if hasattr(given, "choices"):
        choices = [
            "none" if choice is None else _convert_to_plain(choice) for choice in _flatten_choices(given.choices)
        ]
        candidate = type(given)(*choices, mutable=mutable, when=given.when)
    else:
        low, high = _parse_number(given.low), _parse_number(given.high)
        if low is None or high is None:
            return None
        step = None if given.step is None else _parse_number(given.step)
        if (step is None) != (given.step is None):
            return None
        candidate = dataclasses.replace(given, low=low, high=high, step=_round_if_float(step), mutable=mutable)
    return None if candidate.find_problem() else candidate


def _flatten_choices(choices: Collection[Any]) -> list[Any]:
    """Return the choices that a user meant: the elements of one collection, and names of several collections."""
    several = [list_elements(choice) for choice in choices]
    if len(several) == 1 and several[0] is not None:
        return _name_choices(several[0])
    if all(len(one) == 1 for one in several if one is not None):
        return [choice if one is None else one[0] for choice, one in zip(choices, several, strict=True)]
    return _name_choices(list(choices))


def _name_choices(choices: list[Any]) -> list[Any]:
    """Return choices with a name instead of each collection, such as 128-64 of (128, 64)."""
    found = [list_elements(choice) for choice in choices]
    return [choice if one is None else "-".join(map(str, one)) for choice, one in zip(choices, found, strict=True)]


def find_lookup(given: Any, instead: Any) -> str:
    """Return how an objective finds the values that have names as choices `instead`; empty if there are none."""
    values = list(given.choices) if hasattr(given, "choices") else []
    if len(values) == 1 and len(instead.choices) != 1:
        values = list_elements(values[0]) or []
    if all(len(one) == 1 for one in map(list_elements, values) if one is not None):  # each of them became its element
        values = [None if value is None else "" for value in values]
    pairs = dict(zip(instead.choices, values, strict=False)) if values else {}
    named = {name: value for name, value in pairs.items() if value is None or list_elements(value) is not None}
    return repr(named) if named and all(type(name) is str for name in named) else ""


def list_elements(value: object) -> list[Any] | None:
    """Return the elements of a collection, sorted if it is a set; None where the value is no collection.

    For a collection of more than `_MANY` elements, the list is empty.
    """
    value = _convert_to_plain(value)
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        return None
    return [] if len(value) > _MOST_CHOICES else _list_in_order(value)


def normalize_condition(when: Any) -> Any:
    """Return the values of a condition as plain ones, collections as lists, sets sorted; what is none, as it is.

    A range stays one: it may be long.
    """
    if not isinstance(when, Mapping):
        return when
    return {name: _normalize_values(values) for name, values in when.items()}


def _normalize_values(values: Any) -> Any:
    values = _convert_to_plain(values)
    if isinstance(values, (str, bytes, range)) or not isinstance(values, Collection):
        return values
    return [_convert_to_plain(value) for value in _list_in_order(values)]


def _list_in_order(values: Collection[Any]) -> list[Any]:
    if not isinstance(values, (set, frozenset)):
        return list(values)
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def format_with_type(value: object) -> str:
    """Return a value and its type as text: often only the type is wrong."""
    kind = type(value)
    # numpy 1 shows a number as 8, and numpy 2 as np.int64(8).
    shown = str(value) if getattr(value, "ndim", None) == 0 else repr(value)
    return f"{shown} ({'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__})"


def _convert_to_plain(value: Any) -> Any:
    """Return a value that has `tolist`, as numpy's have, as a plain Python value, and others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _round_if_float(value: float | None) -> float | None:
    return round_float(value) if isinstance(value, float) else value


def _parse_number(value: Any) -> int | float | None:
    """Return a number, or the number that a text spells, as an int where it is whole; None for other values."""
    value = _convert_to_plain(value)
    if type(value) is int:
        return value
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < _LARGEST_WHOLE else number
    return None
