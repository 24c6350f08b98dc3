"""Hyperparameters: the values that each can have, and how a value is encoded.

A value is encoded as a *gene*, the number that Propulate breeds. Each parameter has an Optuna
distribution, which is stored in the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Union

from hpo.space.values import (
    convert_to_plain,
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
"""The number that encodes a value. Propulate breeds genes, not values."""

# Propulate stores genes in a float64 array, which cannot represent larger integers exactly.
_LARGEST_INT = 2**53
# Relative to the larger bound. If steps are smaller, Optuna confuses neighbouring values.
_SMALLEST_RELATIVE_STEP = 1e-7
_RELATIVE_ROUNDING = 1e-9  # A value that differs by less from a step is taken as this step.
# A resumed run must have the same search space, but these arguments may differ. So the `repr` omits
# them.
_CHANGEABLE = ("mutable", "prior", "confidence")


@dataclass(frozen=True, repr=False)
class BaseParameter:
    """Base class of all kinds of hyperparameters."""

    mutable: bool = field(default=False, kw_only=True)
    when: Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)
    prior: Any = field(default=None, kw_only=True)
    confidence: str = field(default="medium", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "when", normalize_condition(self.when))

    def __repr__(self) -> str:
        shown = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in _CHANGEABLE
        }
        shown["when"] = shown.pop("when")  # moved to the end
        positional = (
            shown.pop("choices") if "choices" in shown else (shown.pop("low"), shown.pop("high"))
        )
        options = [
            f"{name}={v!r}"
            for name, v in shown.items()
            if v != self.__dataclass_fields__[name].default
        ]
        return f"{type(self).__name__}({', '.join([*map(repr, positional), *options])})"


@dataclass(frozen=True, repr=False)
class Int(BaseParameter):
    """An integer hyperparameter.

    Args:
        low: The lowest value.
        high: The highest value (included). `high - low` must be a multiple of `step`.
        log: Draw and mutate on a logarithmic scale; `low` must then be positive. Default: False.
        step: The distance between two neighbouring values. Default: 1; with `log`, it must be 1.
        mutable: Whether the value can change while a network trains, see Float. Default: False.
        when: The condition under which the parameter is active, see Float. Default: None, always
            active.
        prior: The value that is expected to be good, see Float. Default: None.
        confidence: How sure the prior is, see Float. Default: "medium".

    Example:
        ::

            width = Int(8, 64, step=8)
    """

    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prior", self.convert(convert_to_plain(self.prior)))

    def find_problem(self) -> str | None:
        """Return why the arguments are not valid, or None if they are."""
        if wrong := [bound for bound in (self.low, self.high) if type(bound) is not int]:
            return (
                "the bounds of an Int must be integers (a Float's need not be), "
                f"got {format_with_type(wrong[0])}"
            )
        if not self.low < self.high:
            return "low must be less than high"
        # Optuna subtracts floats.
        if max(abs(self.low), abs(self.high), self.high - self.low) > _LARGEST_INT:
            return (
                f"the bounds of an Int must be within ±2**53, and at most 2**53 ({_LARGEST_INT}) "
                "apart"
            )
        if type(self.step) is not int or self.step < 1:
            return (
                f"the step of an Int must be a positive integer, got {format_with_type(self.step)}"
            )
        if (self.high - self.low) % self.step:
            return _suggest_high(
                self.low + (self.high - self.low) // self.step * self.step, self.low + self.step
            )
        return _find_scale_problem(self)

    @property
    def is_continuous(self) -> bool:
        """Whether genes are real numbers. Otherwise, they are integers."""
        return self.log

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene (number that encodes a value)."""
        if not self.log:
            return self.low, self.low + self.size - 1
        # The limits are half a value wider, so that the lowest and the highest value are drawn as
        # often as others.
        return math.log(self.low - 0.5), math.log(self.high + 0.5)

    @property
    def size(self) -> int:
        """The number of values that the parameter can have."""
        return (self.high - self.low) // self.step + 1

    def list_values(self) -> Iterator[int]:
        """Yield all values that the parameter can have."""
        yield from range(self.low, self.high + 1, self.step)

    def accepts(self, value: object) -> bool:
        """Return whether this parameter can have a value. The type must match too."""
        return (
            type(value) is int
            and self.low <= value <= self.high
            and (value - self.low) % self.step == 0
        )

    def convert(self, value: Any) -> Any:
        """Return a whole float as an int. Other values are returned unchanged."""
        return int(value) if type(value) is float and value.is_integer() else value

    def encode(self, value: Value) -> Gene:
        """Return the gene (number) that encodes a value."""
        return math.log(int(value)) if self.log else self.low + (int(value) - self.low) // self.step

    def decode(self, gene: Gene) -> int:
        """Return the value of a gene. Genes outside the limits count as the nearest limit."""
        low, high = self.limits
        nearest = min(max(gene, low), high)
        value = (
            round(math.exp(nearest))
            if self.log
            else self.low + (round(nearest) - self.low) * self.step
        )
        return min(max(value, self.low), self.high)

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution of this parameter."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.log, step=self.step)


@dataclass(frozen=True, repr=False)
class Float(BaseParameter):
    """A floating-point hyperparameter.

    Values have at most 12 significant digits. Bounds with more digits are rounded towards the
    inside of the range.

    Args:
        low: The lowest value.
        high: The highest value (included). With a `step`, `high - low` must be a multiple of it.
        log: Draw and mutate on a logarithmic scale; `low` must then be positive. Default: False.
        step: The distance between two neighbouring values. `step` and `log` exclude each other.
            Default: None, continuous.
        mutable: Whether the value can change while a network trains, as a learning rate can. With
            ``--pbt``, an individual and the parent whose weights it starts from differ only in
            mutable parameters. Default: False.
        when: The condition: the parameter is active only if each parameter that `when` names is
            active, and has the given value or one of the given values. These parameters must come
            before this one in the space, and must have discrete values. Default: None, always
            active.
        prior: The value that is expected to be good. The search begins with the priors of all
            parameters, and prefers values near them until evaluations contradict. Default: None.
        confidence: How sure the prior is: "low", "medium" or "high". The standard deviation of good
            values around the prior is expected to be 1/2, 1/4 or 1/8 of the range. Of choices, the
            prior is expected to be 2, 4 or 6 times as likely as any other choice. Default:
            "medium".

    Example:
        ::

            lr = Float(1e-4, 1e-1, log=True, prior=3e-4, mutable=True)
            momentum = Float(0.0, 0.99, when={"optimizer": "sgd"})
            dropout_3 = Float(0.0, 0.5, when={"layers": range(3, 6)})
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
            object.__setattr__(self, "prior", self.convert(convert_to_plain(self.prior)))

    def find_problem(self) -> str | None:
        """Return why the arguments are not valid, or None if they are."""
        for bound in (self.low, self.high):
            if type(bound) not in (int, float):
                return f"the bounds of a Float must be numbers, got {format_with_type(bound)}"
        return (
            find_wrong_bounds(self.low, self.high)
            or _find_scale_problem(self)
            or (None if self.step is None else self._find_step_problem(self.step))
        )

    def _find_step_problem(self, step: Any) -> str | None:
        if type(step) not in (int, float) or not 0 < step < 1e308:
            return f"the step of a Float must be a positive number, got {format_with_type(step)}"
        if step < _SMALLEST_RELATIVE_STEP * max(abs(self.low), abs(self.high)):
            return "the step of a Float must be at least a ten-millionth of its larger bound"
        if round_float(float(step)) != step:
            return "the step of a Float must have at most 12 significant digits"
        low, high, by = (Decimal(repr(value)) for value in (self.low, self.high, step))
        below = low + (high - low) // by * by
        return None if below == high else _suggest_high(float(below), float(low + by))

    @property
    def is_continuous(self) -> bool:
        """Whether genes are real numbers. Otherwise, they are integers."""
        return self.step is None

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene (number that encodes a value).

        They are the bounds, the logarithms of the bounds with `log`, or 0 and the number of steps
        with a `step`.
        """
        return (
            (0, int(self.size) - 1)
            if self.step
            else (self.encode(self.low), self.encode(self.high))
        )

    @property
    def size(self) -> float:
        """The number of values that the parameter can have; infinite without a step."""
        return round((self.high - self.low) / self.step) + 1 if self.step else math.inf

    def list_values(self) -> Iterator[float]:
        """Yield all values that the parameter can have. It must have a step."""
        yield from map(self.decode, range(int(self.size)))

    def accepts(self, value: object) -> bool:
        """Return whether this parameter can have a value. The type must match too."""
        if (
            type(value) is not float
            or not self.low <= value <= self.high
            or value != round_float(value)
        ):
            return False
        return self.step is None or value == self.decode(self.encode(value))

    def convert(self, value: Any) -> Any:
        """Return a number in the range as a float. Other values are returned unchanged.

        A number that differs from a valid value only by rounding becomes this value.
        """
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            return value
        nearest = self.decode(self.encode(float(value)))
        return nearest if math.isclose(nearest, value, rel_tol=_RELATIVE_ROUNDING) else float(value)

    def encode(self, value: Value) -> Gene:
        """Return the gene (number) that encodes a value."""
        if self.step:
            return round((float(value) - self.low) / self.step)
        return math.log(float(value)) if self.log else float(value)

    def decode(self, gene: Gene) -> float:
        """Return the value of a gene. Genes outside the limits count as the nearest limit."""
        low, high = self.limits
        gene = min(max(gene, low), high)
        if self.step:
            return min(round_float(self.low + round(gene) * self.step), self.high)
        value = round_float(math.exp(gene) if self.log else float(gene))
        return min(max(value, self.low), self.high)

    def make_distribution(self) -> BaseDistribution:
        """Return the Optuna distribution of this parameter."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)


def _find_scale_problem(parameter: Int | Float) -> str | None:
    if type(parameter.log) is not bool:
        return f"log must be True or False, got {parameter.log!r}"
    if parameter.log and parameter.low <= 0:
        return "low must be greater than 0 on a logarithmic scale"
    if parameter.log and parameter.step not in (None, 1):
        return "step must not be given with log=True (an Ordinal can have any values)"
    return None


def _suggest_high(below: float, at_least: float) -> str:
    return f"high must be low plus a multiple of step, such as {max(below, at_least)!r}"


@dataclass(frozen=True, init=False, repr=False)
class _Choices(BaseParameter):
    # The gene is the index of the choice. Propulate's own one-hot encoding of strings loses
    # mutations: setting one clears the wrong slice of an individual's position (propulate 1.2.2,
    # `Individual.__setitem__`).
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
                return (
                    "a choice must be a string, a number or a boolean, "
                    f"got {format_with_type(choice)}"
                )
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
        """Return the value of a gene. Genes outside the limits count as the nearest limit."""
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
        when: The condition under which the parameter is active, see Float. Default: None, always
            active.
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
        when: The condition under which the parameter is active, see Float. Default: None, always
            active.
        prior: The choice that is expected to be good, see Float. Default: None.
        confidence: How sure the prior is, see Float. Default: "medium".

    Example:
        ::

            batch_size = Ordinal(32, 64, 256)
    """


Parameter = Union[Int, Float, Ordinal, Categorical]


def is_conditional(text: str) -> bool:
    """Return whether a parameter has a condition, given its `repr`."""
    return ", when={" in text


def find_middle_gene(parameter: Parameter) -> Gene:
    """Return the gene in the middle of the limits."""
    low, high = parameter.limits
    return (low + high) / 2 if parameter.is_continuous else (int(low) + int(high)) // 2


def format_parameter(parameter: Any) -> str:
    """Return a parameter as Python code, with all its arguments.

    The `repr` of a parameter omits the arguments that may differ in a resumed run: `mutable`,
    `prior`, `confidence`.
    """
    changeable = (("mutable", False), ("prior", None), ("confidence", "medium"))
    options = [
        f", {name}={getattr(parameter, name)!r}"
        for name, default in changeable
        if repr(getattr(parameter, name)) != repr(default)  # Arrays cannot be compared.
    ]
    return f"{repr(parameter)[:-1]}{''.join(options)})"
