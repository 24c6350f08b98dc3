"""Find out why hyperparameters do not belong to a search space, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap

from hpo.parameters import Parameter, Value
from hpo.space_validation import Condition

_MOST_SHOWN = 10  # values of a condition in a message


class ParamsValidation:
    """Checks the values of hyperparameters. It does not know constraints.

    Args:
        parameters: The parameters of the space by name.
        conditions: The condition of each parameter by name; empty if the parameter is always active.
    """

    def __init__(self, parameters: Mapping[str, Parameter], conditions: Mapping[str, Condition]) -> None:
        self._parameters = parameters
        self._conditions = conditions

    def is_active(self, name: str, params: Mapping[str, object]) -> bool:
        """Return whether a parameter is active, given the hyperparameters before it in the space."""
        return all(parent in params and params[parent] in values for parent, values in self._conditions[name].items())

    def find_wrong_value(self, params: Mapping[str, object]) -> str:
        """Return the first mistake in a complete set of hyperparameters, or "" if there is none."""
        if mistake := next(filter(None, starmap(self.find_mistake, params.items())), ""):
            return mistake
        for name in self._parameters:
            if name not in params and self.is_active(name, params):
                return f"parameter {name!r} is missing"
            if name in params and not self.is_active(name, params):
                return f"parameter {name!r} is active only if {self._format_condition(self._conditions[name])}"
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
            f"{parent!r} is {self._format_alternatives(parent, values)}" for parent, values in condition.items()
        )

    def _format_alternatives(self, name: str, values: frozenset[Value]) -> str:
        if len(values) > _MOST_SHOWN:
            return f"one of {len(values)} values"
        return " or ".join(map(repr, sorted(values, key=self._parameters[name].encode)))
