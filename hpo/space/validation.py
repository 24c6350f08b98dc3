"""Check the parameters and conditions of a search space, and the values of parameters."""

from __future__ import annotations

import dataclasses
import keyword
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import starmap
from typing import Any

from hpo.space.parameters import (
    Categorical,
    Float,
    Int,
    Ordinal,
    Parameter,
    Value,
    format_parameter,
)
from hpo.space.priors import DEVIATIONS
from hpo.space.values import convert_to_plain, format_with_type, list_elements, round_float

_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_LARGEST_WHOLE = 2**53  # A float64 cannot represent all integers above it.
_MOST_VALUES = 10_000  # values of one parameter in a condition
_MOST_SHOWN = 10  # values of a condition in a message

# For each parent parameter, the values that it must have.
Condition = Mapping[str, frozenset[Value]]


def check_parameter(name: str, parameter: object) -> None:
    """Raise an error if a parameter's name or range is not valid.

    Raises:
        ValueError: The name or the range is not valid. The message proposes a valid parameter if
            the intention is clear.
        TypeError: `parameter` is not a parameter.
    """
    # Propulate keeps names with a leading underscore for itself.
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(
            "a parameter name must be a Python identifier without a leading underscore, such as "
            f"'lr', got {name!r}"
        )
    if not isinstance(parameter, (Int, Float, Ordinal, Categorical)):
        raise TypeError(
            f"parameter {name!r} must be an Int, Float, Ordinal or Categorical, got {parameter!r}"
        )
    problem = parameter.find_problem()
    if not problem and type(parameter.mutable) is not bool:
        problem = f"mutable must be True or False, got {parameter.mutable!r}"
    if not problem and (problem := _find_prior_problem(parameter)):
        raise ValueError(f"parameter {name!r}: {problem}, in {format_parameter(parameter)}")
    if problem:
        instead = _correct_parameter(parameter)
        hint = f". Write {format_parameter(instead)}" if instead else ""
        if instead and (lookup := _find_lookup(parameter, instead)):
            hint += f", and in the objective {lookup}.get(params[{name!r}], params[{name!r}])"
        raise ValueError(f"parameter {name!r}: {problem}, in {format_parameter(parameter)}{hint}")


def _find_prior_problem(parameter: Parameter) -> str:
    """Return why the prior of a parameter or its confidence is not valid, or "" if they are."""
    if not isinstance(parameter.confidence, str) or parameter.confidence not in DEVIATIONS:
        return (
            f"confidence must be {', '.join(map(repr, DEVIATIONS))}, got {parameter.confidence!r}"
        )
    if parameter.prior is None:
        return "" if parameter.confidence == "medium" else "confidence needs a prior"
    if parameter.accepts(parameter.prior):
        return ""
    if isinstance(parameter, (Categorical, Ordinal)):
        values = f"one of {', '.join(map(repr, parameter.choices))}"
    else:
        steps = f", in steps of {parameter.step} from {parameter.low}" if parameter.step else ""
        values = f"a number from {parameter.low} to {parameter.high}{steps}"
    return f"the prior must be {values}, got {format_with_type(parameter.prior)}"


def _correct_parameter(parameter: Parameter) -> Parameter | None:
    """Return the valid parameter that the user probably meant; None if it cannot be guessed.

    Args:
        parameter: A parameter that is not valid.
    """
    given: Any = parameter
    mutable = _BOOLEANS.get(str(given.mutable).lower())
    if mutable is None:
        return None
    if hasattr(given, "choices"):
        choices = [
            "none" if choice is None else convert_to_plain(choice)
            for choice in _flatten_choices(given.choices)
        ]
        positions = [
            index
            for index, choice in enumerate(given.choices)
            if repr(choice) == repr(given.prior) != "None"
        ]
        prior = (
            choices[positions[0]]
            if positions and len(choices) == len(given.choices)
            else given.prior
        )
        candidate = type(given)(
            *choices, mutable=mutable, when=given.when, prior=prior, confidence=given.confidence
        )
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
    """Return the choices with each collection among them replaced.

    If the only choice is a collection, its elements become the choices. If each collection has only
    one element, the element replaces the collection. Otherwise, a name replaces each collection,
    see `_name_choices`.
    """
    collections = [list_elements(choice) for choice in choices]
    if len(collections) == 1 and collections[0] is not None:
        return _name_choices(collections[0])
    if all(len(elements) == 1 for elements in collections if elements is not None):
        return [
            choice if elements is None else elements[0]
            for choice, elements in zip(choices, collections, strict=True)
        ]
    return _name_choices(list(choices))


def _name_choices(choices: list[Any]) -> list[Any]:
    """Replace each collection by a name of its elements, such as (128, 64) by "128-64"."""
    collections = [list_elements(choice) for choice in choices]
    return [
        choice if elements is None else "-".join(map(str, elements))
        for choice, elements in zip(choices, collections, strict=True)
    ]


def _find_lookup(given: Any, instead: Any) -> str:
    """Return a dict, as code, from proposed names of choices to the replaced values.

    An error message proposes this dict to the user.

    Args:
        given: The parameter of the user, whose choices are not valid.
        instead: The valid parameter that `_correct_parameter` returned for `given`.

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
    named = {
        name: value
        for name, value in pairs.items()
        if value is None or list_elements(value) is not None
    }
    return repr(named) if named and all(type(name) is str for name in named) else ""


def _round_if_float(value: float | None) -> float | None:
    return round_float(value) if isinstance(value, float) else value


def _parse_number(value: Any) -> int | float | None:
    """Convert a number, or a text such as "0.1", to an int or float; None if it is neither."""
    value = convert_to_plain(value)
    if type(value) is int:
        return value
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < _LARGEST_WHOLE else number
    return None


def make_condition(name: str, parameter: Parameter, earlier: Mapping[str, Parameter]) -> Condition:
    """Return the condition under which a parameter is active; empty without a condition.

    Args:
        parameter: The parameter. Its `when` is not yet checked, and may have any type.
        earlier: The parameters before it in the space, by name.

    Raises:
        ValueError: `when` is not a dict, names a parameter that is not in `earlier` or is not
            discrete, or gives a value that the named parameter cannot have.
    """
    when: Any = parameter.when
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        raise ValueError(
            f"parameter {name!r}: when must be a dict such as {{'optimizer': 'sgd'}}, got {when!r}"
        )
    condition = {}
    for parent, values in when.items():
        if parent not in earlier:
            names = ", ".join(earlier) or "none"
            raise ValueError(
                f"parameter {name!r}: when must name parameters before it in the space ({names}), "
                f"got {parent!r}"
            )
        if earlier[parent].size == math.inf:
            raise ValueError(
                f"parameter {name!r}: when must name parameters with discrete values, got "
                f"{parent!r}, which is {earlier[parent]!r}. Give {parent!r} a step"
            )
        alternatives = values if isinstance(values, (list, range)) and values else [values]
        if len(alternatives) > _MOST_VALUES:
            raise ValueError(
                f"parameter {name!r}: when must list at most {_MOST_VALUES} values of {parent!r}, "
                f"got {len(alternatives)}"
            )
        for value in alternatives:
            if not earlier[parent].accepts(value):
                raise ValueError(
                    f"parameter {name!r}: when must list values of {parent!r} in "
                    f"{earlier[parent]!r}, got {value!r}"
                )
        condition[parent] = frozenset(alternatives)
    return condition


class ParamsValidation:
    """Checks the values of hyperparameters. It does not know constraints.

    Args:
        parameters: The parameters of the space by name.
        conditions: The condition of each parameter by name; empty if the parameter is always
            active.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], conditions: Mapping[str, Condition]
    ) -> None:
        self._parameters = parameters
        self._conditions = conditions

    def is_active(self, name: str, params: Mapping[str, object]) -> bool:
        """Return whether a parameter is active, given the hyperparameters before it."""
        return all(
            parent in params and params[parent] in values
            for parent, values in self._conditions[name].items()
        )

    def find_wrong_value(self, params: Mapping[str, object]) -> str:
        """Return the first mistake in a complete set of hyperparameters, or "" if there is none."""
        if mistake := next(filter(None, starmap(self.find_mistake, params.items())), ""):
            return mistake
        for name in self._parameters:
            if name not in params and self.is_active(name, params):
                return f"parameter {name!r} is missing"
            if name in params and not self.is_active(name, params):
                condition = self._format_condition(self._conditions[name])
                return f"parameter {name!r} is active only if {condition}"
        return ""

    def find_mistake(self, name: str, value: object) -> str:
        """Return why a parameter does not exist or cannot have a value, or "" if it can."""
        if name not in self._parameters:
            return f"unknown parameter {name!r}; this space has {', '.join(self._parameters)}"
        if not self._parameters[name].accepts(value):
            return f"parameter {name!r} must be in {self._parameters[name]!r}, got {value!r}"
        return ""

    def _format_condition(self, condition: Condition) -> str:
        return " and ".join(
            f"{parent!r} is {self._format_alternatives(parent, values)}"
            for parent, values in condition.items()
        )

    def _format_alternatives(self, name: str, values: frozenset[Value]) -> str:
        if len(values) > _MOST_SHOWN:
            return f"one of {len(values)} values"
        return " or ".join(map(repr, sorted(values, key=self._parameters[name].encode)))
