"""Search spaces: named hyperparameters, their conditions, and the constraints between them."""

from __future__ import annotations

import dataclasses
import keyword
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress, islice, starmap
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpo.space.constraints import Constraint, ConstraintSet, LocalConstraints, iterate_batches
from hpo.space.parameters import (
    DEVIATIONS,
    Categorical,
    Float,
    Gene,
    Int,
    Ordinal,
    Parameter,
    Value,
    convert_to_plain,
    draw_prior_gene,
    draw_uniform_gene,
    format_parameter,
    format_with_type,
    list_elements,
    round_float,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_MOST_IN_BATCH = 1000  # candidates that are checked against the constraints at once
_MOST_LISTED = 100_000  # individuals
_MOST_FAILED_DRAWS = 100_000  # `check_constraints` ensures that about 100 of these are allowed.
_MOST_CANDIDATES = 300_000  # to list all individuals, which takes about a second
_MOST_SECONDS = 5.0  # to list all individuals, since constraints may be slow
_PRIOR_DRAWS = 20  # of which that with the most active priors is taken
_NOTHING: Mapping[str, Value] = MappingProxyType({})
_BOOLEANS = {
    **dict.fromkeys(["true", "yes", "on", "1"], True),
    **dict.fromkeys(["false", "no", "off", "0"], False),
}
_LARGEST_WHOLE = 2**53  # A float64 cannot represent all integers above it.
_MOST_VALUES = 10_000  # values of one parameter in a condition
_MOST_SHOWN = 10  # values of a condition in a message

# For each parent parameter, the values that it must have.
Condition = Mapping[str, frozenset[Value]]


class SearchSpace:
    """The hyperparameters of a search, their ranges, and the constraints between them.

    The hyperparameters of an individual are a dict with the values of its active parameters. A
    parameter without a condition (`when`) is always active.

    Args:
        **parameters: The parameters by name: Int, Float, Ordinal or Categorical. A name must be a
            Python identifier without a leading underscore. A conditional parameter must come after
            the parameters in its condition.

    Raises:
        ValueError: The space has no parameters, or the name, range or condition of a parameter is
            not valid. The message names the parameter.
        TypeError: A parameter is not an Int, Float, Ordinal or Categorical.

    Example:
        A space with a conditional parameter and a constraint::

            space = SearchSpace(
                conv_layers=Int(2, 10),
                activation=Categorical("relu", "sigmoid", "tanh"),
                lr=Float(1e-3, 1.0, log=True),
                optimizer=Categorical("sgd", "adam"),
                momentum=Float(0.0, 0.99, when={"optimizer": "sgd"}),
            )
            space.require(
                lambda p: p["conv_layers"] < 8 or p["lr"] < 0.1,
                "deep networks need small learning rates",
            )
    """

    def __init__(self, **parameters: Parameter) -> None:
        if not parameters:
            raise ValueError(
                "a search space needs at least one parameter, e.g. SearchSpace(lr=Float(1e-4, "
                "1e-1))"
            )
        self.conditions: dict[str, Condition] = {}
        for name, parameter in parameters.items():
            _check_parameter(name, parameter)
            self.conditions[name] = _make_condition(
                name, parameter, {earlier: parameters[earlier] for earlier in self.conditions}
            )
        self.parameters: Mapping[str, Parameter] = dict(parameters)
        self.constraint_texts: Sequence[str] = ()
        self._constraints: ConstraintSet = LocalConstraints(self._draw_unconstrained)

    def require(self, constraint: Callable[[dict[str, Any]], bool], text: str) -> None:
        """Add a constraint: allow only hyperparameters for which a function returns True.

        A constraint that reads an inactive parameter is skipped. If the function raises an
        exception during a search, the hyperparameters are not allowed.

        Args:
            constraint: A function of a dict with the active hyperparameters, which returns True or
                False. It must always return the same for the same hyperparameters.
            text: The constraint in words, for messages.

        Raises:
            TypeError: `constraint` is not a function, or `text` is not a string.

        Example:
            ::

                space.require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width")
        """
        if not callable(constraint) or type(text) is not str:
            raise TypeError(
                "a constraint must be a function of hyperparameters and a text, such as "
                'require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width"), '
                f"got {constraint!r}, {text!r}"
            )
        assert isinstance(self._constraints, LocalConstraints), (
            "constraints are added in the process that checks them"
        )
        added = Constraint(constraint, text, frozenset(self.parameters))
        self._constraints.constraints.append(added)
        self.constraint_texts = (*self.constraint_texts, text)

    def delegate_constraints(self, texts: Sequence[str], constraints: ConstraintSet) -> None:
        """Let `constraints` check hyperparameters: the functions are in another process."""
        self.constraint_texts = tuple(texts)
        self._constraints = constraints

    @property
    def priors(self) -> dict[str, Value]:
        """The values that are expected to be good, of the parameters that have a prior."""
        priors = {name: parameter.prior for name, parameter in self.parameters.items()}
        return {name: prior for name, prior in priors.items() if prior is not None}

    @property
    def immutable_names(self) -> list[str]:
        """The names of the parameters that cannot change while a network trains."""
        return [name for name, parameter in self.parameters.items() if not parameter.mutable]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={parameter!r}" for name, parameter in self.parameters.items())
        return f"SearchSpace({inside})"

    def list_gene_limits(self) -> dict[str, tuple[Gene, Gene]]:
        """Return the lowest and the highest gene (number that encodes a value) of each parameter.

        Both are ints or both are floats, as Propulate needs them.
        """
        return {name: parameter.limits for name, parameter in self.parameters.items()}

    def is_active(self, name: str, params: Mapping[str, object]) -> bool:
        """Return whether a parameter is active, given the hyperparameters before it."""
        return all(
            parent in params and params[parent] in values
            for parent, values in self.conditions[name].items()
        )

    def encode(self, params: Mapping[str, Value]) -> dict[str, Gene]:
        """Return the genes of all parameters (numbers that Propulate breeds) for hyperparameters.

        The gene of an inactive parameter is the middle of its limits. A ValueError is raised if a
        value is missing, out of range, or of an inactive or unknown parameter.
        """
        if mistake := self._find_wrong_value(params):
            raise ValueError(mistake)
        genes: dict[str, Gene] = {}
        for name, parameter in self.parameters.items():
            low, high = parameter.limits
            if name in params:
                genes[name] = parameter.encode(params[name])
            elif parameter.is_continuous:
                genes[name] = (low + high) / 2
            else:
                genes[name] = (int(low) + int(high)) // 2
        return genes

    def decode(self, genes: Mapping[str, Gene]) -> dict[str, Value]:
        """Return the hyperparameters that genes encode: the values of all active parameters."""
        params: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            if self.is_active(name, params):
                params[name] = parameter.decode(genes[name])
        return params

    def round_genes(self, genes: Mapping[str, Gene]) -> dict[str, Gene]:
        """Return the genes of the nearest valid values of all parameters."""
        return {
            name: parameter.encode(parameter.decode(genes[name]))
            for name, parameter in self.parameters.items()
        }

    def _find_wrong_value(self, params: Mapping[str, object]) -> str:
        """Return the first mistake in a complete set of hyperparameters, or "" if there is none.

        Constraints are not checked.
        """
        if mistake := next(filter(None, starmap(self._find_mistake, params.items())), ""):
            return mistake
        for name in self.parameters:
            is_active = self.is_active(name, params)
            if is_active and name not in params:
                return f"parameter {name!r} is missing"
            if name in params and not is_active:
                return f"parameter {name!r} is active only if {self._format_condition(name)}"
        return ""

    def _find_mistake(self, name: str, value: object) -> str:
        """Return why a parameter does not exist or cannot have a value, or "" if it can."""
        if name not in self.parameters:
            return f"unknown parameter {name!r}; this space has {', '.join(self.parameters)}"
        if not self.parameters[name].accepts(value):
            return f"parameter {name!r} must be in {self.parameters[name]!r}, got {value!r}"
        return ""

    def _format_condition(self, name: str) -> str:
        texts = []
        for parent, values in self.conditions[name].items():
            text = f"one of {len(values)} values"
            if len(values) <= _MOST_SHOWN:
                text = " or ".join(map(repr, sorted(values, key=self.parameters[parent].encode)))
            texts.append(f"{parent!r} is {text}")
        return " and ".join(texts)

    def check(self, params: Mapping[str, object]) -> None:
        """Raise a ValueError unless the search space and its constraints allow hyperparameters.

        The message names the first mistake.
        """
        if mistake := self.find_mistakes([params])[0]:
            raise ValueError(mistake)

    def find_mistakes(self, batch: Sequence[Mapping[str, object]]) -> list[str]:
        """Return for each set why it is not valid or not allowed; "" if it is allowed."""
        mistakes = [self._find_wrong_value(params) for params in batch]
        valid = [index for index, mistake in enumerate(mistakes) if not mistake]
        found = self.find_violated([batch[index] for index in valid])
        for index, violated in zip(valid, found, strict=True):
            if violated is not None:
                mistakes[index] = f"{self.constraint_texts[violated]}, got {batch[index]!r}"
        return mistakes

    def allows(self, params: Mapping[str, object]) -> bool:
        """Return whether constraints allow one set; `are_allowed` is faster for many sets."""
        return self.are_allowed([params]) == [True]

    def are_allowed(self, batch: Sequence[Mapping[str, object]]) -> list[bool]:
        """Return for each set of hyperparameters whether it satisfies all constraints."""
        return [violated is None for violated in self.find_violated(batch)]

    def find_violated(self, batch: Sequence[Mapping[str, object]]) -> list[int | None]:
        """Return for each set the index of the first violated constraint, or None."""
        if not self.constraint_texts or not batch:
            return [None] * len(batch)
        return self._constraints.find_violated(batch)

    def check_constraints(self) -> None:
        """Raise a ValueError if a constraint fails, or if they allow next to nothing."""
        if self.constraint_texts and (problem := self._constraints.find_problem()):
            raise ValueError(problem)

    def draw(self, rng: Random, given: Mapping[str, Value] = _NOTHING) -> dict[str, Value]:
        """Return random hyperparameters that satisfy all constraints.

        Each value is drawn uniformly from its range, or from the logarithms of its range if its
        scale is logarithmic. `given` has values that some parameters must have. A ValueError is
        raised if one is not valid, or if no draw with these values satisfies the constraints.
        """
        return next(self.iterate_draws(rng, given))

    def iterate_draws(
        self, rng: Random, given: Mapping[str, Value] = _NOTHING
    ) -> Iterator[dict[str, Value]]:
        """Yield random hyperparameters without end, as `draw` returns them."""
        if mistake := next(filter(None, starmap(self._find_mistake, given.items())), ""):
            raise ValueError(mistake)
        return self._iterate_allowed(lambda: self._draw_unconstrained(rng, given), given)

    def draw_priors(self, rng: Random) -> dict[str, Value]:
        """Return hyperparameters in which active parameters have the values of their priors.

        Other values are drawn at random. The constraints are satisfied. Of several draws, that with
        the most active priors is returned.
        """
        priors = self.priors
        drawn = self._iterate_allowed(lambda: self._draw_unconstrained(rng, priors))
        return max(islice(drawn, _PRIOR_DRAWS), key=lambda each: len(each.keys() & priors.keys()))

    def draw_from_priors(self, rng: Random, count: int) -> list[dict[str, Value]]:
        """Draw from all priors `count` times, and return the draws that constraints allow."""
        drawn = [self._draw_unconstrained(rng, draw_gene=draw_prior_gene) for _ in range(count)]
        return list(compress(drawn, self.are_allowed(drawn)))

    def _iterate_allowed(
        self, draw: Callable[[], dict[str, Value]], given: Mapping[str, Value] = _NOTHING
    ) -> Iterator[dict[str, Value]]:
        """Yield draws that satisfy all constraints and have all given values, without end.

        Constraints are checked for several draws at once.
        """
        batches = iterate_batches(iter(draw, None))
        if not self.constraint_texts:
            batches = iterate_batches(iter(draw, None), most_items=1)
        nearest: dict[str, Value] = {}
        failed = 0
        for batch in batches:
            complete = [params for params in batch if params.keys() >= given.keys()]
            allowed = list(compress(complete, self.are_allowed(complete)))
            yield from allowed
            if complete:
                nearest = complete[-1]
            failed = 0 if allowed else failed + len(batch)
            if failed >= _MOST_FAILED_DRAWS:
                self.check({**(nearest or batch[-1]), **given})
                raise ValueError(
                    f"of {failed} individuals drawn at random, none satisfies all constraints"
                )

    @cached_property
    def all_individuals(self) -> list[dict[str, Value]] | None:
        """The hyperparameters of all individuals that the constraints allow.

        The value is None if there are too many individuals, or if the list takes too long.
        """
        return list_individuals(self, _MOST_CANDIDATES, _MOST_SECONDS)

    def describe(self) -> dict[str, str]:
        """Return each parameter as text, which a run stores and compares when it is resumed."""
        return {name: repr(parameter) for name, parameter in self.parameters.items()}

    def make_distributions(self) -> dict[str, BaseDistribution]:
        """Return the Optuna distribution of every parameter, which is stored in the study."""
        from optuna import distributions

        found: dict[str, BaseDistribution] = {}
        for name, p in self.parameters.items():
            if isinstance(p, Int):
                found[name] = distributions.IntDistribution(p.low, p.high, p.log, p.step)
            elif isinstance(p, Float):
                found[name] = distributions.FloatDistribution(p.low, p.high, p.log, p.step)
            else:
                found[name] = distributions.CategoricalDistribution(p.choices)
        return found

    def _draw_unconstrained(
        self,
        rng: Random,
        given: Mapping[str, Value] = _NOTHING,
        draw_gene: Callable[[Parameter, Random], Gene] = draw_uniform_gene,
    ) -> dict[str, Value]:
        params: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            gene = draw_gene(parameter, rng)
            if self.is_active(name, params):
                params[name] = given[name] if name in given else parameter.decode(gene)
        return params


def make_key(params: Mapping[str, Value], names: Iterable[str]) -> tuple[Value | None, ...]:
    """Return the values of all parameters of a space, by which individuals are compared.

    They are None for parameters that are not active.
    """
    return tuple(map(params.get, names))


def list_individuals(
    space: SearchSpace,
    most_candidates: float,
    most_seconds: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[dict[str, Value]] | None:
    """Return the hyperparameters of every individual that the constraints of a space allow.

    The result is None if there are infinitely many or too many individuals, or if the list takes
    too long, since constraints may be slow. `most_candidates` includes candidates that constraints
    do not allow.
    """
    if any(parameter.size == math.inf for parameter in space.parameters.values()):
        return None
    found: list[dict[str, Value]] = []
    candidate_count = 0
    deadline = time.monotonic() + most_seconds
    candidates = _list_remaining(space, list(space.parameters), {})
    for batch in iterate_batches(candidates, most_items=_MOST_IN_BATCH):
        found += compress(batch, space.are_allowed(batch))
        candidate_count += len(batch)
        is_late = time.monotonic() > deadline or is_stopping()
        if candidate_count > most_candidates or len(found) > _MOST_LISTED or is_late:
            return None
    return found


def _list_remaining(
    space: SearchSpace, names: Sequence[str], before: dict[str, Value]
) -> Iterator[dict[str, Value]]:
    if not names:
        yield before
    elif space.is_active(names[0], before):
        for value in space.parameters[names[0]].list_values():
            yield from _list_remaining(space, names[1:], {**before, names[0]: value})
    else:
        yield from _list_remaining(space, names[1:], before)


def _check_parameter(name: str, parameter: object) -> None:
    """Raise an error if a parameter's name or range is not valid.

    The message proposes a valid parameter if the intention is clear.
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


def _correct_parameter(given: Any) -> Parameter | None:
    """Return the valid parameter that the user probably meant; None if it cannot be guessed."""
    mutable = _BOOLEANS.get(str(given.mutable).lower())
    if mutable is None:
        return None
    prior = given.prior
    if hasattr(given, "choices"):
        choices = [
            "none" if choice is None else convert_to_plain(choice)
            for choice in _flatten_choices(given.choices)
        ]
        if prior is not None and len(choices) == len(given.choices):
            for written, choice in zip(given.choices, choices, strict=True):
                if repr(written) == repr(given.prior):
                    prior = choice
                    break
        candidate = type(given)(
            *choices, mutable=mutable, when=given.when, prior=prior, confidence=given.confidence
        )
    else:
        low = _parse_number(given.low)
        high = _parse_number(given.high)
        step = _parse_number(given.step)
        if low is None or high is None or (step is None and given.step is not None):
            return None
        if isinstance(step, float):
            step = round_float(step)
        candidate = dataclasses.replace(
            given, low=low, high=high, step=step, mutable=mutable, prior=_parse_number(prior)
        )
    return None if candidate.find_problem() else candidate


def _flatten_choices(choices: Sequence[Any]) -> list[Any]:
    """Return the choices with each collection among them replaced.

    If the only choice is a collection, its elements become the choices. If each collection has only
    one element, the element replaces the collection. Otherwise, a name of its elements replaces
    each collection, such as "128-64" for (128, 64).
    """
    collections = [list_elements(choice) for choice in choices]
    if len(collections) == 1 and collections[0] is not None:
        choices = collections[0]
        collections = [list_elements(choice) for choice in choices]
    elif all(len(elements) == 1 for elements in collections if elements is not None):
        return [
            choice if elements is None else elements[0]
            for choice, elements in zip(choices, collections, strict=True)
        ]
    return [
        choice if elements is None else "-".join(map(str, elements))
        for choice, elements in zip(choices, collections, strict=True)
    ]


def _find_lookup(given: Any, instead: Any) -> str:
    """Return a dict, as code, from proposed names of choices to the replaced values of the user.

    The result is "" if no choice was replaced by a name.
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


def _parse_number(value: Any) -> int | float | None:
    """Convert a number, or a text such as "0.1", to an int or float; None if it is neither."""
    value = convert_to_plain(value)
    if type(value) is int:
        return value
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        if number.is_integer() and abs(number) < _LARGEST_WHOLE:
            return int(number)
        return number
    return None


def _make_condition(name: str, parameter: Parameter, earlier: Mapping[str, Parameter]) -> Condition:
    """Return the condition under which a parameter is active; empty without a condition.

    Args:
        earlier: The parameters before it in the space, by name.
    """
    when: Any = parameter.when  # It is not yet checked, and may have any type.
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
        alternatives: Sequence[Any] = [values]
        if isinstance(values, (list, range)) and values:
            alternatives = values
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
