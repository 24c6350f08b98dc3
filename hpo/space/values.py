"""Convert values that users write (numpy numbers, sets) to plain Python values."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

_LARGEST_FLOAT = sys.float_info.max
_MOST_CHOICES = 100  # A message does not list more choices than these.

# The relative error of exp(log(x)) is at most about 1e-13 for float64. With 12 digits, a value that
# is encoded and decoded does not change. Two individuals are different if they differ in these
# digits.
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


def list_elements(value: object) -> list[Any] | None:
    """Return the elements of a collection, a set's sorted; None for any other value.

    The list is empty if there are more than 100 elements.
    """
    value = convert_to_plain(value)
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        return None
    return [] if len(value) > _MOST_CHOICES else _list_in_order(value)


def normalize_condition(when: Any) -> Any:
    """Return a condition whose values are plain Python values, lists and ranges.

    Sets become sorted lists. Ranges are not converted, because they may be long. If `when` is not a
    dict, it is returned unchanged.
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
    """Return a scalar or an array of numpy as plain Python values, others unchanged."""
    # The method tolist belongs to values of numpy, and also returns a scalar.
    return value.tolist() if hasattr(value, "tolist") else value


def format_with_type(value: object) -> str:
    """Return a value and its type as text, since often only the type is wrong."""
    kind = type(value)
    # The repr of a number is 8 in numpy 1, and np.int64(8) in numpy 2.
    shown = str(value) if getattr(value, "ndim", None) == 0 else repr(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{shown} ({module}{kind.__qualname__})"
