"""Search spaces: named, typed, bounded hyperparameters, and their two encodings.

A space is checked when it is made, since only the space knows its parameters' names. It encodes hyperparameters to
*genes*, the numbers that Propulate breeds, and to Optuna distributions, which the record keeps. Pure: no MPI, no torch.
"""

from __future__ import annotations

import itertools
import keyword
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Union

from hpo.plain import elements, meant, round_float, round_inwards, with_type

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = Union[bool, int, float, str]
Gene = Union[int, float]

# Propulate holds genes in a float64 array, in which larger integers are no longer exact.
_LARGEST_INT = 2**53


@dataclass(frozen=True)
class Int:
    """An integer from `low` to `high`, both included; `tunable` as for a Float."""

    low: int
    high: int
    tunable: bool = field(default=False, repr=False)

    def problem(self) -> str | None:
        """Return what is wrong with the bounds; None if nothing is."""
        for bound in (self.low, self.high):
            if type(bound) is not int:
                return f"the bounds of an Int must be integers (a Float's need not be), not {with_type(bound)}"
        if not self.low < self.high:
            return "low < high must hold"
        if max(abs(self.low), abs(self.high)) > _LARGEST_INT:
            return f"the bounds of an Int must lie within ±2**53 ({_LARGEST_INT})"
        return None

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene."""
        return self.low, self.high

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        return type(value) is int and self.low <= value <= self.high

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        return int(value)

    def decode(self, gene: Gene) -> int:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        return min(max(round(gene), self.low), self.high)

    def distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high)


@dataclass(frozen=True)
class Float:
    """A float from `low` to `high`, both included, drawn and mutated on a linear or, if `log`, logarithmic scale.

    Values have 12 significant digits; bounds with more digits are rounded towards the inside of the range. What is
    `tunable` can change while a network trains, as a learning rate can: an individual may inherit the weights of
    another one (`--inherit`) if only such parameters differ.
    """

    low: float
    high: float
    log: bool = False
    tunable: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.problem() is None:
            low, high = float(self.low), float(self.high)
            object.__setattr__(self, "low", round_inwards(low, high))
            object.__setattr__(self, "high", round_inwards(high, low))

    def problem(self) -> str | None:
        """Return what is wrong with the bounds; None if nothing is."""
        for bound in (self.low, self.high):
            if type(bound) not in (int, float):
                return f"the bounds of a Float must be numbers, not {with_type(bound)}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and math.isfinite(self.high - self.low)):
            return "the bounds of a Float must be finite"
        if not self.low < self.high:
            return "low < high must hold, in 12 significant digits"
        if type(self.log) is not bool:
            return "log must be True or False"
        if self.log and self.low <= 0:
            return "a logarithmic scale needs low > 0"
        return None

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene: the bounds, or their logarithms."""
        return self.encode(self.low), self.encode(self.high)

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        return type(value) is float and self.low <= value <= self.high and value == round_float(value)

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        return math.log(float(value)) if self.log else float(value)

    def decode(self, gene: Gene) -> float:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        low, high = self.limits
        gene = min(max(gene, low), high)
        value = round_float(math.exp(gene) if self.log else float(gene))
        return min(max(value, self.low), self.high)

    def distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.log)


@dataclass(frozen=True, init=False)
class Categorical:
    """One of several choices without an order: strings, numbers or booleans; `tunable` as for a Float."""

    # The gene is the index of the choice. Propulate's own one-hot encoding of strings loses mutations: setting one
    # clears the wrong slice of an individual's position (propulate 1.2.2, `Individual.__setitem__`).
    choices: tuple[Value, ...]
    tunable: bool = False

    def __init__(self, *choices: Value, tunable: bool = False) -> None:
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "tunable", tunable)

    def __repr__(self) -> str:
        return f"Categorical({', '.join(map(repr, self.choices))})"

    def problem(self) -> str | None:
        """Return what is wrong with the choices; None if nothing is."""
        if not self.choices:
            return "at least one choice is needed"
        for choice in self.choices:
            if type(choice) not in (bool, int, float, str):
                if elements(choice) is not None:
                    return "choices are given one by one, each a string, a number or a boolean"
                return f"a choice must be a string, a number or a boolean, not {with_type(choice)}"
            if type(choice) is float and not math.isfinite(choice):
                return f"a choice must be finite, not {choice!r}"
        # True == 1 == 1.0: Optuna, which looks choices up by equality, could not tell them apart either.
        if len(set(self.choices)) < len(self.choices):
            return "choices must differ from each other (True, 1 and 1.0 are the same)"
        return None

    @property
    def limits(self) -> tuple[Gene, Gene]:
        """The lowest and the highest gene."""
        return 0, len(self.choices) - 1

    def accepts(self, value: object) -> bool:
        """Tell whether this parameter can have this value."""
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def encode(self, value: Value) -> Gene:
        """Return the gene of a value."""
        return self.choices.index(value)

    def decode(self, gene: Gene) -> Value:
        """Return the value of a gene; a gene outside of the limits counts as the nearest limit."""
        return self.choices[min(max(round(gene), 0), len(self.choices) - 1)]

    def distribution(self) -> BaseDistribution:
        """Return the Optuna distribution."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.choices)


Parameter = Union[Int, Float, Categorical]


class SearchSpace:
    """Named hyperparameters with their ranges, in the order in which they are written.

    ::

        space = SearchSpace(
            conv_layers=Int(2, 10),
            activation=Categorical("relu", "sigmoid", "tanh"),
            lr=Float(1e-3, 1.0, log=True),
        )
        genes = space.encode({"conv_layers": 3, "activation": "tanh", "lr": 0.01})
        space.decode(genes)  # {"conv_layers": 3, "activation": "tanh", "lr": 0.01}

    Raises ValueError where there is no parameter, or where the name, the bounds or the choices of a parameter are not
    valid; the message names the parameter. Raises TypeError where a parameter is none of Int, Float and Categorical.
    """

    def __init__(self, **parameters: Parameter) -> None:
        if not parameters:
            raise ValueError("a search space needs at least one parameter, e.g. SearchSpace(lr=Float(1e-4, 1e-1))")
        for name, parameter in parameters.items():
            # Propulate keeps names with a leading underscore for itself.
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
                raise ValueError(
                    f"parameter name {name!r}: must be a Python identifier without a leading underscore, e.g. 'lr'"
                )
            if not isinstance(parameter, (Int, Float, Categorical)):
                raise TypeError(f"parameter {name!r}: must be an Int, Float or Categorical, not {parameter!r}")
            problem = parameter.problem()
            if not problem and type(parameter.tunable) is not bool:
                problem = f"tunable must be True or False, not {parameter.tunable!r}"
            if problem:
                instead = meant(parameter)
                hint = f": write {instead!r}" if instead else ""
                raise ValueError(f"parameter {name!r}: {problem}, but got {parameter!r}{hint}")
        self.parameters: Mapping[str, Parameter] = dict(parameters)

    @property
    def fixed(self) -> list[str]:
        """The names of the parameters that are not tunable."""
        return [name for name, parameter in self.parameters.items() if not parameter.tunable]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={parameter!r}" for name, parameter in self.parameters.items())
        return f"SearchSpace({inside})"

    def limits(self) -> dict[str, tuple[Gene, Gene]]:
        """Return the lowest and the highest gene of each parameter, as Propulate takes them: ints, or floats."""
        return {name: parameter.limits for name, parameter in self.parameters.items()}

    def encode(self, params: Mapping[str, Value]) -> dict[str, Gene]:
        """Return the genes of hyperparameters; raises ValueError where they are not of this space."""
        self.check(params)
        return {name: parameter.encode(params[name]) for name, parameter in self.parameters.items()}

    def decode(self, genes: Mapping[str, Gene]) -> dict[str, Value]:
        """Return the hyperparameters of genes: plain ints, floats, strings and booleans."""
        return {name: parameter.decode(genes[name]) for name, parameter in self.parameters.items()}

    def nearest_genes(self, params: Mapping[str, Value]) -> dict[str, Gene]:
        """Return the genes of hyperparameters whose floats may have too many digits: they are rounded to this space."""
        genes = {name: parameter.encode(params[name]) for name, parameter in self.parameters.items()}
        return self.encode(self.decode(genes))

    def check(self, params: Mapping[str, object]) -> None:
        """Raise a ValueError, naming the first wrong parameter, unless `params` are hyperparameters of this space."""
        for name in [*params, *self.parameters]:
            if name not in self.parameters:
                raise ValueError(f"unknown parameter {name!r}; this space has {', '.join(self.parameters)}")
            if name not in params:
                raise ValueError(f"parameter {name!r} is missing")
            if not self.parameters[name].accepts(params[name]):
                raise ValueError(f"parameter {name!r}: {params[name]!r} is not in {self.parameters[name]!r}")

    def draw(self, rng: Random) -> dict[str, Value]:
        """Return hyperparameters, each drawn uniformly from its range (its logarithm, for logarithmic floats)."""
        genes: dict[str, Gene] = {}
        for name, parameter in self.parameters.items():
            low, high = parameter.limits
            genes[name] = rng.uniform(low, high) if isinstance(parameter, Float) else rng.randint(int(low), int(high))
        return self.decode(genes)

    @property
    def size(self) -> float:
        """The number of different individuals: infinite where a parameter is a Float."""
        sizes = [parameter.limits[1] - parameter.limits[0] + 1 for parameter in self.parameters.values()]
        return math.inf if any(isinstance(p, Float) for p in self.parameters.values()) else math.prod(sizes)

    def everything(self) -> Iterator[dict[str, Value]]:
        """Yield the hyperparameters of every individual, for a space without floats."""
        ranges = [range(int(low), int(high) + 1) for low, high in self.limits().values()]
        for genes in itertools.product(*ranges):
            yield self.decode(dict(zip(self.parameters, genes, strict=True)))

    def describe(self) -> dict[str, str]:
        """Return each parameter as text, to be kept with a run and compared on resuming it."""
        return {name: repr(parameter) for name, parameter in self.parameters.items()}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the Optuna distribution of every parameter."""
        return {name: parameter.distribution() for name, parameter in self.parameters.items()}
