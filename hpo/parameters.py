"""Hyperparameters: which values each can have, and their two encodings.

A value is encoded to a *gene*, the number that Propulate breeds, and each parameter has an Optuna distribution, which
the record keeps. Pure: no MPI, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Union

from hpo.plain_values import (
    find_wrong_bounds,
    format_with_type,
    list_elements,
    normalize_condition,
    round_float,
    round_inwards,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = Union[bool, int, float, str]
Gene = Union[int, float]
# Propulate holds genes in a float64 array, in which larger integers are no longer exact.
_LARGEST_INT = 2**53
_SMALLEST_RELATIVE_STEP = (
    1e-7  # of the larger bound: of finer ones, Optuna takes values for others than it has suggested
)


@dataclass(frozen=True, repr=False)
class _Parameter:
    mutable: bool = field(default=False, kw_only=True)
    when: Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "when", normalize_condition(self.when))

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "mutable"}
        shown["when"] = shown.pop("when")  # the last one
        given = shown.pop("choices") if "choices" in shown else (shown.pop("low"), shown.pop("high"))
        options = [f"{name}={v!r}" for name, v in shown.items() if v != self.__dataclass_fields__[name].default]
        return f"{type(self).__name__}({', '.join([*map(repr, given), *options])})"


@dataclass(frozen=True, repr=False)
class Int(_Parameter):
    """An integer from `low` to `high`, both included, drawn and mutated on a linear or, if `log`, logarithmic scale.

    With a `step`, it is `low`, `low + step` and so on. `mutable` and `when` are as for a Float.
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    def find_problem(self) -> str | None:
        """Return what is wrong with the bounds; None if nothing is."""
        if wrong := [bound for bound in (self.low, self.high) if type(bound) is not int]:
            return f"the bounds of an Int must be integers (a Float's need not be), not {format_with_type(wrong[0])}"
        if not self.low < self.high:
            return "low < high must hold"
        if max(abs(self.low), abs(self.high), self.high - self.low) > _LARGEST_INT:  # Optuna subtracts floats
            return f"the bounds of an Int must lie within ±2**53, and be at most 2**53 ({_LARGEST_INT}) apart"
        if type(self.step) is not int or self.step < 1:
            return f"the step of an Int must be a positive integer, not {format_with_type(self.step)}"
        if (self.high - self.low) % self.step:
            return _suggest_high(self.low + (self.high - self.low) // self.step * self.step, self.low + self.step)
        return _find_scale_problem(self)

    @property
    def is_continuous(self) -> bool:
        """Whether genes lie anywhere between the limits; otherwise they are integers."""
        return self.log

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene."""
        if not self.log:
            return self.low, self.low + self.size - 1
        # Half a value further, so that the lowest and the highest are drawn as often as those between them.
        return math.log(self.low - 0.5), math.log(self.high + 0.5)

    @property
    def size(self) -> int:
        """The number of values."""
        return (self.high - self.low) // self.step + 1

    def list_values(self) -> Iterator[int]:
        """Yield all values."""
        yield from range(self.low, self.high + 1, self.step)

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        return type(value) is int and self.low <= value <= self.high and (value - self.low) % self.step == 0

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        return math.log(int(value)) if self.log else self.low + (int(value) - self.low) // self.step

    def decode(self, gene: Gene) -> int:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        low, high = self.limits
        nearest = min(max(gene, low), high)
        value = round(math.exp(nearest)) if self.log else self.low + (round(nearest) - self.low) * self.step
        return min(max(value, self.low), self.high)

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log, step=self.step)


@dataclass(frozen=True, repr=False)
class Float(_Parameter):
    """A float from `low` to `high`, both included, drawn and mutated on a linear or, if `log`, logarithmic scale.

    Values have 12 significant digits; bounds with more digits are rounded towards the inside of the range. With a
    `step`, values are `low`, `low + step` and so on.

    What is `mutable` can change while a network trains, as a learning rate can: an individual may inherit the weights
    of another one (`--pbt`) if only such parameters differ.

    A parameter exists only `when` others, which stand before it in the space, exist and have certain values:
    ``momentum=Float(0.0, 0.99, when={"optimizer": "sgd"})``, or one of several:
    ``width_3=Int(8, 64, when={"layers": range(3, 6)})``.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_problem() is None:
            low, high = float(self.low), float(self.high)
            object.__setattr__(self, "low", round_inwards(low, high))
            object.__setattr__(self, "high", round_inwards(high, low))
            object.__setattr__(self, "step", None if self.step is None else float(self.step))

    def find_problem(self) -> str | None:
        """Return what is wrong with the bounds; None if nothing is."""
        for bound in (self.low, self.high):
            if type(bound) not in (int, float):
                return f"the bounds of a Float must be numbers, not {format_with_type(bound)}"
        return (
            find_wrong_bounds(self.low, self.high)
            or _find_scale_problem(self)
            or (None if self.step is None else self._find_step_problem(self.step))
        )

    def _find_step_problem(self, step: Any) -> str | None:
        if type(step) not in (int, float) or not 0 < step < 1e308:
            return f"the step of a Float must be a positive number, not {format_with_type(step)}"
        if step < _SMALLEST_RELATIVE_STEP * max(abs(self.low), abs(self.high)):
            return "the step of a Float must be at least a ten-millionth of its larger bound"
        if round_float(float(step)) != step:
            return "the step of a Float has 12 significant digits at most"
        low, high, by = (Decimal(repr(value)) for value in (self.low, self.high, step))
        below = low + (high - low) // by * by
        return None if below == high else _suggest_high(float(below), float(low + by))

    @property
    def is_continuous(self) -> bool:
        """Whether genes lie anywhere between the limits; otherwise they are integers."""
        return self.step is None

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene: the bounds, or their logarithms, or the number of steps."""
        return (0, int(self.size) - 1) if self.step else (self.encode(self.low), self.encode(self.high))

    @property
    def size(self) -> float:
        """The number of values: infinite without a step."""
        return round((self.high - self.low) / self.step) + 1 if self.step else math.inf

    def list_values(self) -> Iterator[float]:
        """Yield all values of a float with a step."""
        yield from map(self.decode, range(int(self.size)))

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        if type(value) is not float or not self.low <= value <= self.high or value != round_float(value):
            return False
        return self.step is None or value == self.decode(self.encode(value))

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        if self.step:
            return round((float(value) - self.low) / self.step)
        return math.log(float(value)) if self.log else float(value)

    def decode(self, gene: Gene) -> float:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        low, high = self.limits
        gene = min(max(gene, low), high)
        if self.step:
            return min(round_float(self.low + round(gene) * self.step), self.high)
        value = round_float(math.exp(gene) if self.log else float(gene))
        return min(max(value, self.low), self.high)

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)


@dataclass(frozen=True, init=False, repr=False)
class _Choices(_Parameter):
    # The gene is the index of the choice. Propulate's own one-hot encoding of strings loses mutations: setting one
    # clears the wrong slice of an individual's position (propulate 1.2.2, `Individual.__setitem__`).
    choices: tuple[Value, ...]

    def __init__(self, *choices: Value, mutable: bool = False, when: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "mutable", mutable)
        object.__setattr__(self, "when", normalize_condition(when))

    def find_problem(self) -> str | None:
        """Return what is wrong with the choices; None if nothing is."""
        if not self.choices:
            return "at least one choice is needed"
        for choice in self.choices:
            if type(choice) not in (bool, int, float, str):
                if list_elements(choice) is not None:
                    return "choices must be given one by one, each a string, a number or a boolean"
                return f"a choice must be a string, a number or a boolean, not {format_with_type(choice)}"
            if type(choice) is float and not math.isfinite(choice):
                return f"a choice must be finite, not {choice!r}"
        # True == 1 == 1.0: Optuna, which looks choices up by equality, could not tell them apart either.
        if len(set(self.choices)) < len(self.choices):
            return "choices must differ from each other (True, 1 and 1.0 are the same)"
        return None

    is_continuous = False

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene."""
        return 0, len(self.choices) - 1

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.choices)

    def list_values(self) -> Iterator[Value]:
        """Yield all values."""
        yield from self.choices

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        return self.choices.index(value)

    def decode(self, gene: Gene) -> Value:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        return self.choices[min(max(round(gene), 0), len(self.choices) - 1)]

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.choices)


class Categorical(_Choices):
    """One of several choices without an order: strings, numbers or booleans; `mutable` and `when` as for a Float."""


class Ordinal(_Choices):
    """A Categorical whose choices have an order, as batch sizes have; neighbours are equally far apart."""


Parameter = Union[Int, Float, Ordinal, Categorical]


def is_conditional(described: str) -> bool:
    """Tell whether a parameter, which is described as its `repr` does, exists only when others have some values."""
    return ", when={" in described


def _find_scale_problem(parameter: Int | Float) -> str | None:
    if type(parameter.log) is not bool:
        return "log must be True or False"
    if parameter.log and parameter.low <= 0:
        return "a logarithmic scale needs low > 0"
    if parameter.log and parameter.step not in (None, 1):
        return "a logarithmic scale has no steps (an Ordinal may have any values)"
    return None


def _suggest_high(below: float, at_least: float) -> str:
    return f"high must be low plus some steps, such as {max(below, at_least)!r}"
