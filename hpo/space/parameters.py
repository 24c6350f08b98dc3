"""Hyperparameters: the values that each can have, and how a value is encoded.

A value is encoded as a *gene*, the number that Propulate breeds. A prior of a number is a normal
distribution of the gene around the expected value. The range of the parameter cuts it off. A prior
of a categorical parameter makes the expected choice more likely than each other choice. The widths
are those of NePS (https://github.com/automl/neps).
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any, Union

Value = Union[bool, int, float, str]
Gene = Union[int, float]
"""The number that encodes a value. Propulate breeds genes, not values."""
DEVIATIONS = {"low": 0.5, "medium": 0.25, "high": 0.125}
"""The standard deviation of a prior by its confidence, as a share of the parameter's range."""
ODDS = {"low": 2, "medium": 4, "high": 6}
"""How many times as likely as each other choice the expected choice is, by confidence."""

_LARGEST_FLOAT = sys.float_info.max
_MOST_CHOICES = 100  # A message does not list more choices than these.
# The relative error of exp(log(x)) is at most about 1e-13 for float64. With 12 digits, a value that
# is encoded and decoded does not change. Two individuals are different if they differ in these
# digits.
_SIGNIFICANT_DIGITS = 12
# Propulate stores genes in a float64 array, which cannot represent larger integers exactly.
_LARGEST_INT = 2**53
# Relative to the larger bound. If steps are smaller, Optuna confuses neighbouring values.
_SMALLEST_RELATIVE_STEP = 1e-7
_RELATIVE_ROUNDING = 1e-9  # A value that differs by less from a step is taken as this step.
# A resumed run must have the same search space, but these arguments may differ. So the `repr` omits
# them.
_CHANGEABLE = ("mutable", "prior", "confidence")
_WRONG_ARGUMENT = "its arguments must be numbers, strings, True or False"


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
        fields = self.__dataclass_fields__
        shown = {name: getattr(self, name) for name in fields if name not in _CHANGEABLE}
        shown["when"] = shown.pop("when")  # moved to the end
        if "choices" in shown:
            positional = shown.pop("choices")
        else:
            positional = (shown.pop("low"), shown.pop("high"))
        options = [f"{name}={v!r}" for name, v in shown.items() if v != fields[name].default]
        # A class of the user that inherits from a kind of parameter is shown as this kind.
        kind = next(base.__name__ for base in type(self).__mro__ if base.__module__ == __name__)
        return f"{kind}({', '.join([*map(repr, positional), *options])})"


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
        if type(value) is not int or not self.low <= value <= self.high:
            return False
        return (value - self.low) % self.step == 0

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
        if self.log:
            return min(max(round(math.exp(nearest)), self.low), self.high)
        return self.low + (round(nearest) - self.low) * self.step


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
            low = float(self.low)
            high = float(self.high)
            object.__setattr__(self, "low", round_inwards(low, high))
            object.__setattr__(self, "high", round_inwards(high, low))
            object.__setattr__(self, "step", None if self.step is None else float(self.step))
            object.__setattr__(self, "prior", self.convert(convert_to_plain(self.prior)))

    def find_problem(self) -> str | None:
        """Return why the arguments are not valid, or None if they are."""
        for bound in (self.low, self.high):
            if type(bound) not in (int, float):
                return f"the bounds of a Float must be numbers, got {format_with_type(bound)}"
        if not all(-_LARGEST_FLOAT <= bound <= _LARGEST_FLOAT for bound in (self.low, self.high)):
            return "the bounds of a Float must be finite"
        if not math.isfinite(float(self.high) - float(self.low)):
            return f"the bounds of a Float must be at most {_LARGEST_FLOAT:.1e} apart"
        if not self.low < self.high:
            return "low must be less than high in 12 significant digits"
        return _find_scale_problem(self) or self._find_step_problem(self.step)

    def _find_step_problem(self, step: Any) -> str | None:
        if step is None:
            return None
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
        """The lowest and the highest gene (number that encodes a value)."""
        if self.step:
            return 0, int(self.size) - 1
        return self.encode(self.low), self.encode(self.high)

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
        return 0, len(self.choices) - 1

    @property
    def size(self) -> int:
        return len(self.choices)

    def list_values(self) -> Iterator[Value]:
        yield from self.choices

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def convert(self, value: Any) -> Any:
        if type(value) in (int, float) and value in self.choices:
            return self.choices[self.choices.index(value)]
        return value

    def encode(self, value: Value) -> Gene:
        return self.choices.index(value)

    def decode(self, gene: Gene) -> Value:
        return self.choices[min(max(round(gene), 0), len(self.choices) - 1)]


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


def format_parameter(parameter: Any) -> str:
    """Return a parameter as Python code, with all its arguments.

    The `repr` of a parameter omits the arguments that may differ in a resumed run: `mutable`,
    `prior`, `confidence`.
    """
    text = repr(parameter)[:-1]
    for name in _CHANGEABLE:
        value = getattr(parameter, name)
        default = BaseParameter.__dataclass_fields__[name].default
        if repr(value) != repr(default):  # A prior may be an array, which has no single `!=`.
            text += f", {name}={value!r}"
    return f"{text})"


def draw_uniform_gene(parameter: Parameter, rng: Random) -> Gene:
    """Return a random gene, uniform between the parameter's limits."""
    low, high = parameter.limits
    return rng.uniform(low, high) if parameter.is_continuous else rng.randint(int(low), int(high))


def draw_prior_gene(parameter: Parameter, rng: Random) -> Gene:
    """Return a random gene from a parameter's prior, or a uniform one if it has no prior."""
    if parameter.prior is None:
        return draw_uniform_gene(parameter, rng)
    expected = parameter.encode(parameter.prior)
    low, high = parameter.limits
    if isinstance(parameter, Categorical):
        odds = ODDS[parameter.confidence]
        if rng.random() * (high + odds) < odds:
            return expected
        other = rng.randrange(int(high))
        return other if other < expected else other + 1
    deviation = compute_deviation(parameter)
    while True:
        gene: Gene = rng.gauss(expected, deviation)
        if not parameter.is_continuous:
            gene = round(gene)
        if low <= gene <= high:
            return gene


def compute_deviation(parameter: Parameter) -> float:
    """Return the standard deviation of the gene of a number around the expected value."""
    low, high = parameter.limits
    return DEVIATIONS[parameter.confidence] * (high - low + (not parameter.is_continuous))


def describe_priors(parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Return each parameter with a prior as text. A resumed run may have other priors."""
    given = {name: each for name, each in parameters.items() if each.prior is not None}
    return {name: format_parameter(each) for name, each in given.items()}


def parse_parameter(text: str) -> Parameter:
    """Return the parameter that code such as `Float(1e-4, 1e-1, log=True)` describes.

    The code is not run. The arguments are numbers, strings, booleans, dicts and ranges. Raise a
    ValueError for any other text.
    """
    classes: dict[str, Any] = {kind.__name__: kind for kind in (Categorical, Float, Int, Ordinal)}
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is not a parameter") from None
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.func.id not in classes
    ):
        raise ValueError(f"a parameter must be a {', '.join(classes)}, got {text!r}")
    values = [_read_value(node) for node in call.args]
    if any(keyword.arg is None for keyword in call.keywords):  # **options
        raise ValueError(_WRONG_ARGUMENT)
    options = {str(keyword.arg): _read_value(keyword.value) for keyword in call.keywords}
    try:
        parameter: Parameter = classes[call.func.id](*values, **options)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return parameter


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
    condition = {}
    for name, given in when.items():
        values = convert_to_plain(given)
        if isinstance(values, Collection) and not isinstance(values, (str, bytes, range)):
            values = [convert_to_plain(value) for value in _list_in_order(values)]
        condition[name] = values
    return condition


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
