"""Check the parameters of a search space, and the conditions under which they are active."""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping
from typing import Any

from hpo.parameters import Categorical, Float, Int, Ordinal, Parameter, Value
from hpo.plain_values import correct_parameter, find_lookup, format_parameter, format_with_type
from hpo.priors import DEVIATIONS

_MOST_VALUES = 10_000  # values of one parameter in a condition

Condition = Mapping[str, frozenset[Value]]  # For each parent parameter, the values that it must have.


def check_parameter(name: str, parameter: object) -> None:
    """Raise an error if the name or the range of a parameter is not valid. Its condition is not checked.

    Raises:
        ValueError: The name or the range is not valid. The message proposes a valid parameter if the intention is
            clear.
        TypeError: `parameter` is not a parameter.
    """
    # Propulate keeps names with a leading underscore for itself.
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(
            f"a parameter name must be a Python identifier without a leading underscore, such as 'lr', got {name!r}"
        )
    if not isinstance(parameter, (Int, Float, Ordinal, Categorical)):
        raise TypeError(f"parameter {name!r} must be an Int, Float, Ordinal or Categorical, got {parameter!r}")
    problem = parameter.find_problem()
    if not problem and type(parameter.mutable) is not bool:
        problem = f"mutable must be True or False, got {parameter.mutable!r}"
    if not problem and (problem := _find_prior_problem(parameter)):
        raise ValueError(f"parameter {name!r}: {problem}, in {format_parameter(parameter)}")
    if problem:
        instead = correct_parameter(parameter)
        hint = f". Write {format_parameter(instead)}" if instead else ""
        if instead and (lookup := find_lookup(parameter, instead)):
            hint += f", and in the objective {lookup}.get(params[{name!r}], params[{name!r}])"
        raise ValueError(f"parameter {name!r}: {problem}, in {format_parameter(parameter)}{hint}")


def _find_prior_problem(parameter: Parameter) -> str:
    """Return why the prior of a parameter or its confidence is not valid, or "" if they are."""
    if not isinstance(parameter.confidence, str) or parameter.confidence not in DEVIATIONS:
        return f"confidence must be {', '.join(map(repr, DEVIATIONS))}, got {parameter.confidence!r}"
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


def make_condition(name: str, parameter: Parameter, earlier: Mapping[str, Parameter]) -> Condition:
    """Return the condition under which a parameter is active; empty if the parameter has no condition.

    Args:
        parameter: The parameter. Its `when` is not yet checked, and may have any type.
        earlier: The parameters before it in the space, by name.

    Raises:
        ValueError: `when` is not a dict, names a parameter that is not in `earlier` or is not discrete, or gives a
            value that the named parameter cannot have.
    """
    when: Any = parameter.when
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        raise ValueError(f"parameter {name!r}: when must be a dict such as {{'optimizer': 'sgd'}}, got {when!r}")
    condition = {}
    for parent, values in when.items():
        if parent not in earlier:
            names = ", ".join(earlier) or "none"
            raise ValueError(
                f"parameter {name!r}: when must name parameters before it in the space ({names}), got {parent!r}"
            )
        if earlier[parent].size == math.inf:
            raise ValueError(
                f"parameter {name!r}: when must name parameters with discrete values, got {parent!r}, which is "
                f"{earlier[parent]!r}. Give {parent!r} a step"
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
                    f"parameter {name!r}: when must list values of {parent!r} in {earlier[parent]!r}, got {value!r}"
                )
        condition[parent] = frozenset(alternatives)
    return condition
