"""Search spaces: named hyperparameters, of which some are conditional, and the rules between them.

A space is checked when it is made, since only the space knows its parameters' names. Pure: no MPI, no torch.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, starmap
from random import Random
from typing import TYPE_CHECKING, Any

from hpo.constraint_set import Constraint, ConstraintSet, LocalConstraints, iterate_batches
from hpo.listing import list_individuals
from hpo.parameters import Categorical, Float, Gene, Int, Ordinal, Parameter, Value
from hpo.plain_values import correct_parameter, find_lookup, format_parameter

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_MOST_FAILED_DRAWS = 100_000  # of which `check_rules` sees to it that some dozens obey the rules
_MOST_CANDIDATES = 300_000  # to list all individuals: a second
_MOST_SECONDS = 5.0  # to list all individuals; rules may be slow
_MOST_VALUES = 10_000  # of another parameter that a condition may name
_MOST_SHOWN = 10

Condition = Mapping[str, frozenset[Value]]  # the values that other parameters must have


class SearchSpace:
    """Named hyperparameters with their ranges, in the order in which they are written.

    ::

        space = SearchSpace(
            conv_layers=Int(2, 10),
            activation=Categorical("relu", "sigmoid", "tanh"),
            lr=Float(1e-3, 1.0, log=True),
            optimizer=Categorical("sgd", "adam"),
            momentum=Float(0.0, 0.99, when={"optimizer": "sgd"}),
        )
        space.require(lambda p: p["conv_layers"] < 8 or p["lr"] < 0.1, "deep networks need small learning rates")
        params = {"conv_layers": 3, "activation": "tanh", "lr": 0.01, "optimizer": "adam"}
        space.decode(space.encode(params)) == params

    Every individual has a gene for each parameter; hyperparameters are those that exist, and where one does not, its
    gene does not matter.

    Raises ValueError if there are no parameters, or if the name, the bounds, the choices or the condition of a
    parameter are not valid; the message names the parameter. Raises TypeError if a parameter is none of Int, Float,
    Ordinal and Categorical.
    """

    def __init__(self, **parameters: Parameter) -> None:
        if not parameters:
            raise ValueError("a search space needs at least one parameter, e.g. SearchSpace(lr=Float(1e-4, 1e-1))")
        self.conditions: dict[str, Condition] = {}
        for name, parameter in parameters.items():
            _check_parameter(name, parameter)
            self.conditions[name] = _make_condition(
                name, parameter, {other: parameters[other] for other in self.conditions}
            )
        self.parameters: Mapping[str, Parameter] = dict(parameters)
        self.constraint_texts: Sequence[str] = ()  # their texts
        self._constraints: ConstraintSet = LocalConstraints(self._draw_unconstrained)

    def require(self, rule: Callable[[dict[str, Any]], bool], text: str) -> None:
        """Allow only hyperparameters for which a function returns True; `text` is the demand in words.

        ::

            space.require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width")

        The function gets the hyperparameters that exist; if it looks up another one, it demands nothing.
        Raises TypeError if `rule` is not a function, or `text` not a text.
        """
        if not callable(rule) or type(text) is not str:
            raise TypeError(
                "a rule is a function of hyperparameters and a text, such as "
                f'require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width"), not {rule!r}, {text!r}'
            )
        assert isinstance(self._constraints, LocalConstraints), "rules that are asked elsewhere are added there"
        self._constraints.add(Constraint(rule, text, frozenset(self.parameters)))
        self.constraint_texts = (*self.constraint_texts, text)

    def delegate_constraints(self, rules: Sequence[str], constraints: ConstraintSet) -> None:
        """Let others answer for rules with these texts, whose functions are in another process."""
        self.constraint_texts = tuple(rules)
        self._constraints = constraints

    @property
    def immutable_names(self) -> list[str]:
        """The names of the parameters that are not mutable."""
        return [name for name, parameter in self.parameters.items() if not parameter.mutable]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={parameter!r}" for name, parameter in self.parameters.items())
        return f"SearchSpace({inside})"

    def list_gene_limits(self) -> dict[str, tuple[Gene, Gene]]:
        """Return the lowest and the highest gene of each parameter, as Propulate takes them: ints, or floats."""
        return {name: parameter.limits for name, parameter in self.parameters.items()}

    def is_active(self, name: str, params: Mapping[str, object]) -> bool:
        """Return whether a parameter exists, given the hyperparameters that precede it in the space."""
        return all(other in params and params[other] in values for other, values in self.conditions[name].items())

    def encode(self, params: Mapping[str, Value]) -> dict[str, Gene]:
        """Return the genes of hyperparameters; raises ValueError if they are not of this space, whatever its rules.

        A parameter that does not exist has the middle of its limits.
        """
        if mistake := self._find_wrong_value(params):
            raise ValueError(mistake)
        return {
            name: parameter.encode(params[name]) if name in params else _find_middle_gene(parameter)
            for name, parameter in self.parameters.items()
        }

    def decode(self, genes: Mapping[str, Gene]) -> dict[str, Value]:
        """Return the hyperparameters of genes: plain ints, floats, strings and booleans."""
        params: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            if self.is_active(name, params):
                params[name] = parameter.decode(genes[name])
        return params

    def round_genes(self, genes: Mapping[str, Gene]) -> dict[str, Gene]:
        """Return the genes of the nearest values of all parameters, those that do not exist among them."""
        return {name: one.encode(one.decode(genes[name])) for name, one in self.parameters.items()}

    def check(self, params: Mapping[str, object]) -> None:
        """Raise a ValueError, naming the first wrong parameter, unless `params` are hyperparameters of this space."""
        if mistake := self.find_mistakes([params])[0]:
            raise ValueError(mistake)

    def find_mistakes(self, batch: Sequence[Mapping[str, object]]) -> list[str]:
        """Return for each item of a batch why it is not hyperparameters of this space, empty if it is."""
        mistakes = [self._find_wrong_value(params) for params in batch]
        fitting = [index for index, mistake in enumerate(mistakes) if not mistake]
        for index, rule in zip(fitting, self.find_violated([batch[index] for index in fitting]), strict=True):
            if rule is not None:
                mistakes[index] = f"{self.constraint_texts[rule]}, but got {batch[index]!r}"
        return mistakes

    def allows(self, params: Mapping[str, object]) -> bool:
        """Return whether hyperparameters obey all rules; `allowed` takes many in much less time."""
        return self.are_allowed([params]) == [True]

    def are_allowed(self, batch: Sequence[Mapping[str, object]]) -> list[bool]:
        """Return whether each of many hyperparameters obeys all rules."""
        return [rule is None for rule in self.find_violated(batch)]

    def find_violated(self, batch: Sequence[Mapping[str, object]]) -> list[int | None]:
        """Return the index of the first rule that each of many hyperparameters breaks, None if it obeys all rules."""
        return self._constraints.find_violated(batch) if self.constraint_texts and batch else [None] * len(batch)

    def check_constraints(self) -> None:
        """Raise a ValueError if the rules leave nothing or next to nothing, or if one cannot be asked."""
        if self.constraint_texts and (problem := self._constraints.find_problem()):
            raise ValueError(problem)

    def draw(self, rng: Random, given: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """Return hyperparameters, each drawn uniformly from its range (its logarithm, on a logarithmic scale).

        Parameters that are `given` keep their values. Raises ValueError if these are not of the space, or if no draw
        obeys the rules.
        """
        return next(self.iterate_draws(rng, given))

    def iterate_draws(self, rng: Random, given: Mapping[str, Value] | None = None) -> Iterator[dict[str, Value]]:
        """Yield hyperparameters without end, as `draw` returns them; rules are asked about several at once."""
        given = given or {}
        if mistake := next(filter(None, starmap(self._find_mistake, given.items())), ""):
            raise ValueError(mistake)
        drawn = iter(lambda: self._draw_unconstrained(rng, given), None)
        nearest, failed = None, 0
        for batch in iterate_batches(drawn) if self.constraint_texts else iterate_batches(drawn, most_items=1):
            complete = [params for params in batch if params.keys() >= given.keys()]
            obeying = list(compress(complete, self.are_allowed(complete)))
            yield from obeying
            nearest = complete[-1] if complete else nearest
            failed = 0 if obeying else failed + len(batch)
            if failed >= _MOST_FAILED_DRAWS:
                self.check({**(nearest or batch[-1]), **given})
                raise ValueError(f"of {failed} individuals drawn at random, none obeys all rules")

    @cached_property
    def all_individuals(self) -> list[dict[str, Value]] | None:
        """The hyperparameters of every individual; None if these are too many, or take too long, to be listed."""
        return list_individuals(self, _MOST_CANDIDATES, _MOST_SECONDS)

    def describe(self) -> dict[str, str]:
        """Return each parameter as text, to be kept with a run and compared on resuming it."""
        return {name: repr(parameter) for name, parameter in self.parameters.items()}

    def make_distributions(self) -> dict[str, BaseDistribution]:
        """Return the Optuna distribution of every parameter."""
        return {name: parameter.make_distribution() for name, parameter in self.parameters.items()}

    def _find_wrong_value(self, params: Mapping[str, object]) -> str:
        if mistake := next(filter(None, starmap(self._find_mistake, params.items())), ""):
            return mistake
        for name in self.parameters:
            if name not in params and self.is_active(name, params):
                return f"parameter {name!r} is missing"
            if name in params and not self.is_active(name, params):
                return f"parameter {name!r} exists only where {self._format_condition(self.conditions[name])}"
        return ""

    def _find_mistake(self, name: str, value: object) -> str:
        if name not in self.parameters:
            return f"unknown parameter {name!r}; this space has {', '.join(self.parameters)}"
        if not self.parameters[name].accepts(value):
            return f"parameter {name!r}: {value!r} is not in {self.parameters[name]!r}"
        return ""

    def _format_condition(self, condition: Condition) -> str:
        return " and ".join(
            f"{other!r} is {self._format_alternatives(other, values)}" for other, values in condition.items()
        )

    def _format_alternatives(self, name: str, values: frozenset[Value]) -> str:
        if len(values) > _MOST_SHOWN:
            return f"one of {len(values)} values"
        return " or ".join(map(repr, sorted(values, key=self.parameters[name].encode)))

    def _draw_unconstrained(self, rng: Random, given: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """Return hyperparameters that need not obey rules, with those values that are given, where they exist."""
        params: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            low, high = parameter.limits
            gene = rng.uniform(low, high) if parameter.is_continuous else rng.randint(int(low), int(high))
            if self.is_active(name, params):
                params[name] = given[name] if given and name in given else parameter.decode(gene)
        return params


def _check_parameter(name: str, parameter: object) -> None:
    # Propulate keeps names with a leading underscore for itself.
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(
            f"parameter name {name!r}: must be a Python identifier without a leading underscore, e.g. 'lr'"
        )
    if not isinstance(parameter, (Int, Float, Ordinal, Categorical)):
        raise TypeError(f"parameter {name!r}: must be an Int, Float, Ordinal or Categorical, not {parameter!r}")
    problem = parameter.find_problem()
    if not problem and type(parameter.mutable) is not bool:
        problem = f"mutable must be True or False, not {parameter.mutable!r}"
    if problem:
        instead = correct_parameter(parameter)
        hint = f": write {format_parameter(instead)}" if instead else ""
        if instead and (lookup := find_lookup(parameter, instead)):
            hint += f", and in the objective {lookup}.get(params[{name!r}], params[{name!r}])"
        raise ValueError(f"parameter {name!r}: {problem}, but got {format_parameter(parameter)}{hint}")


def _make_condition(name: str, parameter: Parameter, before: Mapping[str, Parameter]) -> Condition:
    """Return the condition of a parameter; raises ValueError where those before it cannot have such values."""
    when: Any = parameter.when
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        raise ValueError(f"parameter {name!r}: when must be a dict such as {{'optimizer': 'sgd'}}, not {when!r}")
    condition = {}
    for other, values in when.items():
        if other not in before:
            there = f"before it are {', '.join(before)}" if before else "it is the first"
            raise ValueError(f"parameter {name!r}: when asks for {other!r}, which must be one before it; {there}")
        if before[other].size == math.inf:
            raise ValueError(f"parameter {name!r}: when asks for {other!r}, which has any value of {before[other]!r}")
        several = values if isinstance(values, (list, range)) and values else [values]
        if len(several) > _MOST_VALUES:
            raise ValueError(f"parameter {name!r}: when asks for {len(several)} values of {other!r}, too many")
        for value in several:
            if not before[other].accepts(value):
                raise ValueError(f"parameter {name!r}: when asks for {other!r} = {value!r}, not in {before[other]!r}")
        condition[other] = frozenset(several)
    return condition


def _find_middle_gene(parameter: Parameter) -> Gene:
    low, high = parameter.limits
    return (low + high) / 2 if parameter.is_continuous else (int(low) + int(high)) // 2
