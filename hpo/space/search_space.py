"""Search spaces: named hyperparameters and the constraints between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, islice, starmap
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpo.space.constraints import Constraint, ConstraintSet, LocalConstraints, iterate_batches
from hpo.space.parameters import Gene, Parameter, Value, find_middle_gene
from hpo.space.priors import draw_prior_gene, draw_uniform_gene
from hpo.space.validation import Condition, ParamsValidation, check_parameter, make_condition

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_MOST_IN_BATCH = 1000  # candidates that are checked against the constraints at once
_MOST_LISTED = 100_000  # individuals
_MOST_FAILED_DRAWS = 100_000  # `check_constraints` ensures that about 100 of these are allowed.
_MOST_CANDIDATES = 300_000  # to list all individuals, which takes about a second
_MOST_SECONDS = 5.0  # to list all individuals, since constraints may be slow
_PRIOR_DRAWS = 20  # of which that with the most active priors is taken
_NOTHING: Mapping[str, Value] = MappingProxyType({})


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
            check_parameter(name, parameter)
            self.conditions[name] = make_condition(
                name, parameter, {earlier: parameters[earlier] for earlier in self.conditions}
            )
        self.parameters: Mapping[str, Parameter] = dict(parameters)
        self._validation = ParamsValidation(self.parameters, self.conditions)
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
        self._constraints.add(Constraint(constraint, text, frozenset(self.parameters)))
        self.constraint_texts = (*self.constraint_texts, text)

    def delegate_constraints(self, texts: Sequence[str], constraints: ConstraintSet) -> None:
        """Let `constraints` check hyperparameters: the functions are in another process.

        Args:
            texts: The constraints in words.
            constraints: Sends hyperparameters to the other process to check them.
        """
        self.constraint_texts = tuple(texts)
        self._constraints = constraints

    @property
    def priors(self) -> dict[str, Value]:
        """The values that are expected to be good, of the parameters that have a prior."""
        return {
            name: value
            for name, parameter in self.parameters.items()
            if (value := parameter.prior) is not None
        }

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
        return self._validation.is_active(name, params)

    def encode(self, params: Mapping[str, Value]) -> dict[str, Gene]:
        """Return the genes (numbers that Propulate breeds) that encode hyperparameters.

        The gene of an inactive parameter is the middle of its limits.

        Args:
            params: The values of all active parameters. Constraints are not checked.

        Returns:
            A gene for each parameter of the space.

        Raises:
            ValueError: A value is missing, out of range, or of an inactive or unknown parameter.
        """
        if mistake := self._validation.find_wrong_value(params):
            raise ValueError(mistake)
        return {
            name: parameter.encode(params[name]) if name in params else find_middle_gene(parameter)
            for name, parameter in self.parameters.items()
        }

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

    def check(self, params: Mapping[str, object]) -> None:
        """Raise a ValueError unless the search space and its constraints allow hyperparameters.

        Args:
            params: The values of all active parameters.

        Raises:
            ValueError: A parameter is not valid, or a constraint is violated. The message names the
                first of them.
        """
        if mistake := self.find_mistakes([params])[0]:
            raise ValueError(mistake)

    def find_mistakes(self, batch: Sequence[Mapping[str, object]]) -> list[str]:
        """Return for each set why it is not valid or not allowed; "" if it is allowed."""
        mistakes = [self._validation.find_wrong_value(params) for params in batch]
        valid = [index for index, mistake in enumerate(mistakes) if not mistake]
        for index, violated in zip(
            valid, self.find_violated([batch[index] for index in valid]), strict=True
        ):
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
        return (
            self._constraints.find_violated(batch)
            if self.constraint_texts and batch
            else [None] * len(batch)
        )

    def check_constraints(self) -> None:
        """Raise a ValueError if a constraint fails, or if they allow next to nothing."""
        if self.constraint_texts and (problem := self._constraints.find_problem()):
            raise ValueError(problem)

    def draw(self, rng: Random, given: Mapping[str, Value] | None = None) -> dict[str, Value]:
        """Return random hyperparameters that satisfy all constraints.

        Each value is drawn uniformly from its range, or from the logarithms of its range if its
        scale is logarithmic.

        Args:
            rng: The random number generator.
            given: Values that some parameters must have; by default, all values are drawn.

        Returns:
            The values of all active parameters.

        Raises:
            ValueError: A given value is not valid, or no draw with these values satisfies the
                constraints.
        """
        return next(self.iterate_draws(rng, given))

    def iterate_draws(
        self, rng: Random, given: Mapping[str, Value] | None = None
    ) -> Iterator[dict[str, Value]]:
        """Yield random hyperparameters without end, as `draw` returns them."""
        given = given or {}
        if mistake := next(filter(None, starmap(self._validation.find_mistake, given.items())), ""):
            raise ValueError(mistake)
        return self._iterate_allowed(lambda: self._draw_unconstrained(rng, given), given)

    def draw_priors(self, rng: Random) -> dict[str, Value]:
        """Return hyperparameters in which active parameters have the values of their priors.

        Other values are drawn at random. The constraints are satisfied. Of several draws, that with
        the most active priors is returned.

        Raises:
            ValueError: No draw with the expected values satisfies the constraints.
        """
        priors = self.priors
        drawn = islice(
            self._iterate_allowed(lambda: self._draw_unconstrained(rng, priors)), _PRIOR_DRAWS
        )
        return max(drawn, key=lambda params: len(params.keys() & priors.keys()))

    def draw_from_priors(self, rng: Random, count: int) -> list[dict[str, Value]]:
        """Draw hyperparameters from all priors, and return those that constraints allow.

        Args:
            rng: The random number generator.
            count: The number of draws, all of which may violate the constraints.
        """
        drawn = [self._draw_unconstrained(rng, draw_gene=draw_prior_gene) for _ in range(count)]
        return list(compress(drawn, self.are_allowed(drawn)))

    def _iterate_allowed(
        self, draw: Callable[[], dict[str, Value]], given: Mapping[str, Value] = _NOTHING
    ) -> Iterator[dict[str, Value]]:
        """Yield draws that satisfy all constraints and have all given values, without end.

        Constraints are checked for several draws at once.
        """
        drawn = iter(draw, None)
        nearest, failed = None, 0
        for batch in (
            iterate_batches(drawn)
            if self.constraint_texts
            else iterate_batches(drawn, most_items=1)
        ):
            complete = [params for params in batch if params.keys() >= given.keys()]
            allowed = list(compress(complete, self.are_allowed(complete)))
            yield from allowed
            nearest = complete[-1] if complete else nearest
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
        """Return the Optuna distribution of every parameter."""
        return {name: parameter.make_distribution() for name, parameter in self.parameters.items()}

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


def list_individuals(
    space: SearchSpace,
    most_candidates: float,
    most_seconds: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[dict[str, Value]] | None:
    """Return the hyperparameters of every individual that the constraints of a space allow.

    Args:
        most_candidates: Give up after this number of candidates, whether or not constraints allow
            them.
        most_seconds: Give up after this time, since constraints may be slow.
        is_stopping: A function that returns whether to give up now.

    Returns:
        The hyperparameters of all individuals. None if there are infinitely many or too many, or if
        the list takes too long.
    """
    if any(parameter.size == math.inf for parameter in space.parameters.values()):
        return None
    found: list[dict[str, Value]] = []
    candidate_count, deadline = 0, time.monotonic() + most_seconds
    for batch in iterate_batches(
        _list_remaining(space, list(space.parameters), {}), most_items=_MOST_IN_BATCH
    ):
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
