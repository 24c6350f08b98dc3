"""Hyperparameters with a list of choices: Categorical and Ordinal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.parameter_base import BaseParameter, Gene, Value
from hpo.plain_values import convert_to_plain, format_with_type, list_elements, normalize_condition

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, init=False, repr=False)
class _Choices(BaseParameter):
    # The gene is the index of the choice. Propulate's own one-hot encoding of strings loses mutations: setting one
    # clears the wrong slice of an individual's position (propulate 1.2.2, `Individual.__setitem__`).
    choices: tuple[Value, ...]

    def __init__(
        self,
        *choices: Value,
        mutable: bool = False,
        when: Mapping[str, Any] | None = None,
        prior: Value | None = None,
        confidence: str = "medium",
    ) -> None:
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "mutable", mutable)
        object.__setattr__(self, "when", normalize_condition(when))
        object.__setattr__(self, "prior", prior)
        object.__setattr__(self, "confidence", confidence)
        if self.find_problem() is None:
            object.__setattr__(self, "prior", self.convert(convert_to_plain(prior)))

    def find_problem(self) -> str | None:
        """Return why the choices are not valid, or None if they are."""
        if not self.choices:
            return "there must be at least one choice"
        for choice in self.choices:
            if type(choice) not in (bool, int, float, str):
                if list_elements(choice) is not None:
                    return "choices must be given one by one, each a string, a number or a boolean"
                return f"a choice must be a string, a number or a boolean, got {format_with_type(choice)}"
            if type(choice) is float and not math.isfinite(choice):
                return f"a choice must be finite, got {choice!r}"
        # True == 1 == 1.0, and Optuna finds choices by equality.
        if len(set(self.choices)) < len(self.choices):
            return "choices must differ from each other (True, 1 and 1.0 are the same)"
        return None

    is_continuous = False

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene (number that encodes a value)."""
        return 0, len(self.choices) - 1

    @property
    def size(self) -> int:
        """The number of values that the parameter can have."""
        return len(self.choices)

    def list_values(self) -> Iterator[Value]:
        """Yield all values that the parameter can have."""
        yield from self.choices

    def accepts(self, value: object) -> bool:
        """Return whether a value is one of the choices, and has the same type."""
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def convert(self, value: Any) -> Any:
        """Return the choice that equals a number. Other values are returned unchanged."""
        is_number = type(value) in (int, float) and value in self.choices
        return self.choices[self.choices.index(value)] if is_number else value

    def encode(self, value: Value) -> Gene:
        """Return the gene (number) that encodes a value."""
        return self.choices.index(value)

    def decode(self, gene: Gene) -> Value:
        """Return the value that a gene encodes. A gene outside the limits counts as the nearest limit."""
        return self.choices[min(max(round(gene), 0), len(self.choices) - 1)]

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution of this parameter."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.choices)


class Categorical(_Choices):
    """A hyperparameter that is one of several choices without an order.

    Args:
        *choices: The choices, one argument each: strings, numbers or booleans.
        mutable: Whether the value can change while a network trains, see Float. Default: False.
        when: The condition under which the parameter is active, see Float. Default: None, always active.
        prior: The choice that is expected to be good, see Float. Default: None.
        confidence: How sure the prior is, see Float. Default: "medium".

    Example:
        ::

            activation = Categorical("relu", "sigmoid", "tanh")
    """


class Ordinal(_Choices):
    """A hyperparameter that is one of several choices in an order, such as a batch size.

    All neighbouring choices count as equally far apart, whatever their values are.

    Args:
        *choices: The choices in their order, one argument each: strings, numbers or booleans.
        mutable: Whether the value can change while a network trains, see Float. Default: False.
        when: The condition under which the parameter is active, see Float. Default: None, always active.
        prior: The choice that is expected to be good, see Float. Default: None.
        confidence: How sure the prior is, see Float. Default: "medium".

    Example:
        ::

            batch_size = Ordinal(32, 64, 256)
    """
