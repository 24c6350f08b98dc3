"""Parse a hyperparameter from Python code, without running the code."""

from __future__ import annotations

import ast
from typing import Any

from hpo.space.parameters import Categorical, Float, Int, Ordinal, Parameter

_PARAMETER_CLASSES: dict[str, Any] = {
    kind.__name__: kind for kind in (Categorical, Float, Int, Ordinal)
}
_WRONG_ARGUMENT = "its arguments must be numbers, strings, True or False"


def parse_parameter(text: str) -> Parameter:
    """Return the parameter that a text such as `Float(1e-4, 1e-1, log=True)` describes.

    Args:
        text: Code that calls Int, Float, Categorical or Ordinal. The arguments are numbers,
            strings, booleans, dicts and ranges.

    Raises:
        ValueError: The text is not such code.
    """
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is not a parameter") from None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.func.id not in _PARAMETER_CLASSES
    ):
        raise ValueError(f"a parameter must be a {', '.join(_PARAMETER_CLASSES)}, got {text!r}")
    values = [_read_value(node) for node in call.args]
    options = {_read_name(keyword): _read_value(keyword.value) for keyword in call.keywords}
    try:
        parameter: Parameter = _PARAMETER_CLASSES[call.func.id](*values, **options)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return parameter


def _read_name(keyword: ast.keyword) -> str:
    if keyword.arg is None:  # **options
        raise ValueError(_WRONG_ARGUMENT)
    return keyword.arg


def _read_value(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Dict):
        return {
            _read_value(key): _read_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "range"
        and node.args
    ):
        return range(*map(_read_value, node.args))
    try:
        if node is not None:  # The key of **more in a dict is None.
            return ast.literal_eval(node)
        raise ValueError
    except ValueError:
        raise ValueError(_WRONG_ARGUMENT) from None
