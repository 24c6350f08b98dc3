"""Convert the values that users write (numpy numbers, numbers in quotes, lists) to plain Python values."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

Parameter = TypeVar("Parameter")

_LARGEST_FLOAT = sys.float_info.max
_LARGEST_WHOLE = 2**53  # A float64 cannot represent all integers above it.
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_MOST_CHOICES = 100  # A message does not list more choices than these.

# The relative error of exp(log(x)) is at most about 1e-13 for float64. With 12 digits, a value that is encoded and
# decoded does not change. Two individuals are different if they differ in these digits.
_SIGNIFICANT_DIGITS = 12


def round_float(value: float) -> float:
    """Round to 12 significant digits. All floats of hyperparameters are rounded in this way."""
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def round_inwards(value: float, inside: float) -> float:
    """Round a bound of a range to 12 significant digits, so that it does not leave the range.

    Args:
        inside: A number in the range. It shows the direction in which the bound may be moved.
    """
    rounded = round_float(value)
    if (rounded - value) * (inside - value) >= 0 or rounded == value:
        return rounded
    step = 10.0 ** (math.floor(math.log10(abs(value))) - _SIGNIFICANT_DIGITS + 1)
    return round_float(rounded + math.copysign(step, inside - value))


def find_wrong_bounds(low: float, high: float) -> str:
    """Return why the bounds of a Float are not valid, or "" if they are."""
    if not all(-_LARGEST_FLOAT <= bound <= _LARGEST_FLOAT for bound in (low, high)):
        return "the bounds of a Float must be finite"
    if not math.isfinite(float(high) - float(low)):
        return f"the bounds of a Float must be at most {_LARGEST_FLOAT:.1e} apart"
    return "" if low < high else "low must be less than high in 12 significant digits"


def format_parameter(parameter: Any) -> str:
    """Return a parameter as Python code, with all its arguments.

    The `repr` of a parameter omits the arguments that may differ in a resumed run: `mutable`, `prior`, `confidence`.
    """
    changeable = (("mutable", False), ("prior", None), ("confidence", "medium"))
    options = [
        f", {name}={getattr(parameter, name)!r}"
        for name, default in changeable
        if repr(getattr(parameter, name)) != repr(default)  # Arrays cannot be compared.
    ]
    return f"{repr(parameter)[:-1]}{''.join(options)})"


def correct_parameter(parameter: Parameter) -> Parameter | None:
    """Return the valid parameter that the user probably meant; None if it cannot be guessed.

    Args:
        parameter: A parameter that is not valid.
    """
    given: Any = parameter
    mutable = _BOOLEANS.get(str(given.mutable).lower())
    if mutable is None:
        return None
    if hasattr(given, "choices"):
        choices = ["none" if choice is None else convert_to_plain(choice) for choice in _flatten_choices(given.choices)]
        positions = [index for index, choice in enumerate(given.choices) if repr(choice) == repr(given.prior) != "None"]
        prior = choices[positions[0]] if positions and len(choices) == len(given.choices) else given.prior
        candidate = type(given)(*choices, mutable=mutable, when=given.when, prior=prior, confidence=given.confidence)
    else:
        low, high = _parse_number(given.low), _parse_number(given.high)
        if low is None or high is None:
            return None
        step = None if given.step is None else _parse_number(given.step)
        if (step is None) != (given.step is None):
            return None
        prior = None if given.prior is None else _parse_number(given.prior)
        candidate = dataclasses.replace(
            given, low=low, high=high, step=_round_if_float(step), mutable=mutable, prior=prior
        )
    return None if candidate.find_problem() else candidate


def _flatten_choices(choices: Collection[Any]) -> list[Any]:
    """Replace the collections among choices, and return the new choices. Other choices stay unchanged.

    If the only choice is a collection, its elements become the choices. If each collection has only one element, the
    element replaces the collection. Otherwise, a name replaces each collection, see `_name_choices`.
    """
    collections = [list_elements(choice) for choice in choices]
    if len(collections) == 1 and collections[0] is not None:
        return _name_choices(collections[0])
    if all(len(elements) == 1 for elements in collections if elements is not None):
        return [
            choice if elements is None else elements[0] for choice, elements in zip(choices, collections, strict=True)
        ]
    return _name_choices(list(choices))


def _name_choices(choices: list[Any]) -> list[Any]:
    """Replace each collection by a name that is made of its elements, such as (128, 64) by "128-64"."""
    collections = [list_elements(choice) for choice in choices]
    return [
        choice if elements is None else "-".join(map(str, elements))
        for choice, elements in zip(choices, collections, strict=True)
    ]


def find_lookup(given: Any, instead: Any) -> str:
    """Return the code of a dict that maps proposed names of choices to the values that they replace.

    An error message proposes this dict to the user.

    Args:
        given: The parameter of the user, whose choices are not valid.
        instead: The valid parameter that `correct_parameter` returned for `given`.

    Returns:
        The code of the dict, or "" if no choice was replaced by a name.
    """
    values = list(given.choices) if hasattr(given, "choices") else []
    if len(values) == 1 and len(instead.choices) != 1:
        values = list_elements(values[0]) or []
    # Collections with one element each were replaced by the element, not by a name.
    if all(len(elements) == 1 for elements in map(list_elements, values) if elements is not None):
        values = [None if value is None else "" for value in values]
    pairs = dict(zip(instead.choices, values, strict=False)) if values else {}
    named = {name: value for name, value in pairs.items() if value is None or list_elements(value) is not None}
    return repr(named) if named and all(type(name) is str for name in named) else ""


def list_elements(value: object) -> list[Any] | None:
    """Return the elements of a collection, sorted if it is a set, or None if the value is not a collection.

    The list is empty if there are more than 100 elements.
    """
    value = convert_to_plain(value)
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        return None
    return [] if len(value) > _MOST_CHOICES else _list_in_order(value)


def normalize_condition(when: Any) -> Any:
    """Return a condition whose values are plain Python values, lists and ranges.

    Sets become sorted lists. Ranges are not converted, because they may be long. If `when` is not a dict, it is
    returned unchanged.
    """
    if not isinstance(when, Mapping):
        return when
    return {name: _normalize_values(values) for name, values in when.items()}


def _normalize_values(values: Any) -> Any:
    values = convert_to_plain(values)
    if isinstance(values, (str, bytes, range)) or not isinstance(values, Collection):
        return values
    return [convert_to_plain(value) for value in _list_in_order(values)]


def _list_in_order(values: Collection[Any]) -> list[Any]:
    if not isinstance(values, (set, frozenset)):
        return list(values)
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def convert_to_plain(value: Any) -> Any:
    """Return a scalar or an array of numpy as plain Python values. Other values are returned unchanged."""
    # The method tolist belongs to values of numpy, and also returns a scalar.
    return value.tolist() if hasattr(value, "tolist") else value


def format_with_type(value: object) -> str:
    """Return a value and its type as text, since often only the type is wrong."""
    kind = type(value)
    # The repr of a number is 8 in numpy 1, and np.int64(8) in numpy 2.
    shown = str(value) if getattr(value, "ndim", None) == 0 else repr(value)
    return f"{shown} ({'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__})"


def _round_if_float(value: float | None) -> float | None:
    return round_float(value) if isinstance(value, float) else value


def _parse_number(value: Any) -> int | float | None:
    """Convert a number, or a text such as "0.1", to an int if it is whole or to a float; None for other values."""
    value = convert_to_plain(value)
    if type(value) is int:
        return value
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < _LARGEST_WHOLE else number
    return None
