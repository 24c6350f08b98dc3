"""Plain Python values in the place of what people write: numpy's numbers, numbers in quotes, long fractions, lists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

Parameter = TypeVar("Parameter")

_MANY = 100  # more choices than anybody writes one by one


# exp(log(x)) is off by some 1e-13 at worst in the range of float64; 12 digits absorb that, so that decoding an encoded
# value returns it unchanged. Two individuals are different if they differ in these digits.
_DIGITS = 12


def round_float(value: float) -> float:
    """Round to the digits that values have."""
    return float(f"{value:.{_DIGITS}g}")


def round_inwards(value: float, inside: float) -> float:
    """Round to `_DIGITS` digits, towards `inside` where rounding would leave the range."""
    rounded = round_float(value)
    if (rounded - value) * (inside - value) >= 0 or rounded == value:
        return rounded
    step = 10.0 ** (math.floor(math.log10(abs(value))) - _DIGITS + 1)
    return round_float(rounded + math.copysign(step, inside - value))


def meant(parameter: Parameter) -> Parameter | None:
    """Return the valid parameter that a person meant by one with values of wrong types; None where there is none."""
    given: Any = parameter
    if hasattr(given, "choices"):
        spread = [elements(choice) or [choice] for choice in given.choices]
        choices = [_plain(choice) for several in spread for choice in several]
        candidate = type(given)(*choices, tunable=given.tunable, when=given.when)
    else:
        low, high = _number(given.low), _number(given.high)
        if low is None or high is None:
            return None
        step = None if given.step is None else _number(given.step)
        if (step is None) != (given.step is None):
            return None
        candidate = dataclasses.replace(given, low=low, high=high, step=_short(step))
    return None if candidate.problem() else candidate


def elements(value: object) -> list[Any] | None:
    """Return the elements of a collection, sorted if it is a set; None where the value is no collection.

    For a collection of more than `_MANY` elements, the list is empty.
    """
    value = _plain(value)
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        return None
    return [] if len(value) > _MANY else _listed(value)


def plain_condition(when: Any) -> Any:
    """Return the values of a condition as plain ones, collections as lists, sets sorted; what is none, as it is.

    A range stays one: it may be long.
    """
    if not isinstance(when, Mapping):
        return when
    return {name: _plain_values(values) for name, values in when.items()}


def _plain_values(values: Any) -> Any:
    values = _plain(values)
    if isinstance(values, (str, bytes, range)) or not isinstance(values, Collection):
        return values
    return [_plain(value) for value in _listed(values)]


def _listed(values: Collection[Any]) -> list[Any]:
    if not isinstance(values, (set, frozenset)):
        return list(values)
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def with_type(value: object) -> str:
    """Return a value and its type as text: often only the type is wrong."""
    kind = type(value)
    return f"{value!r} ({'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__})"


def _plain(value: Any) -> Any:
    """Return a value that has `tolist`, as numpy's have, as a plain Python value, and others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: float | None) -> float | None:
    return round_float(value) if isinstance(value, float) else value


def _number(value: Any) -> int | float | None:
    """Return a number, or the number that a text spells, as an int where it is whole; None for other values."""
    value = _plain(value)
    if type(value) is int:
        return value
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return int(number) if number.is_integer() else number
    return None
