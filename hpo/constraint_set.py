"""Rules between hyperparameters: functions of a user, and how a search space asks them, also in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Protocol, TypeVar

_MOST_DRAWS = 10_000
_LEAST_OBEYING = 10  # of these must obey the rules: one in a thousand
_LEAST_DRAWS = 200  # draws that rules are asked about at least, so that what is wrong with them shows
_MOST_IN_BATCH = 64  # candidates: asking another process takes 0.1 ms and 5 us for each of them

T = TypeVar("T")


class ConstraintSet(Protocol):
    """The rules of a search space, whose functions may be in another process."""

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first rule that each set of hyperparameters breaks, None if it obeys all rules."""

    def find_problem(self) -> str:
        """Return why the rules are unsound, as `check_rules` does; empty if they are sound."""


@dataclass(frozen=True)
class Constraint:
    """One rule of a search space."""

    function: Callable[[dict[str, Any]], bool]
    """Returns whether hyperparameters are allowed."""
    text: str
    """The demand in words."""
    parameter_names: frozenset[str]
    """The names of all parameters of the space."""

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Return whether hyperparameters are allowed; they are not if the function fails."""
        try:
            return self.call_function(params) is not False
        except ValueError:
            return False

    def call_function(self, params: Mapping[str, Any]) -> bool | None:
        """Return the function's answer, or None if the function reads a parameter that does not exist.

        Raises ValueError if it fails, or returns neither True nor False.
        """
        try:
            answer: Any = self.function(dict(params))
        except (Exception, SystemExit) as error:
            missing = error.args[0] if isinstance(error, KeyError) and error.args else None
            if isinstance(missing, str) and missing in self.parameter_names and missing not in params:
                return None
            name = f"there is no parameter {error}" if isinstance(error, KeyError) else repr(error)
            raise ValueError(f"the rule {self.text!r} cannot be asked about {dict(params)!r}: {name}") from error
        with suppress(Exception):
            answer = answer.item()  # numpy's True
        if type(answer) is not bool:
            raise ValueError(f"the rule {self.text!r} must return True or False, not {answer!r} for {dict(params)!r}")
        return answer


class LocalConstraints:
    """Rules whose functions are in this process; `draw` returns hyperparameters that are drawn at random."""

    def __init__(self, draw: Callable[[Random], Mapping[str, Any]]) -> None:
        self._draw = draw
        self._constraints: list[Constraint] = []

    def add(self, rule: Constraint) -> None:
        """Add a rule."""
        self._constraints.append(rule)

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first rule that each set of hyperparameters breaks, None if it obeys all rules."""
        return [
            next((index for index, rule in enumerate(self._constraints) if not rule.allows(params)), None)
            for params in batch
        ]

    def find_problem(self) -> str:
        """Return why the rules are unsound, as `check_rules` does; empty if they are sound."""
        rng = Random(0)
        return find_constraint_problem(self._constraints, lambda: self._draw(rng))


def iterate_batches(items: Iterable[T], first_size: int = 1, most_items: int = _MOST_IN_BATCH) -> Iterator[list[T]]:
    """Yield items in lists of `first`, twice as many, and so on up to `most`, each taken when it is needed."""
    size, source = first_size, iter(items)
    while batch := list(islice(source, size)):
        yield batch
        size = min(2 * size, most_items)


def find_constraint_problem(rules: Sequence[Constraint], draw: Callable[[], Mapping[str, Any]]) -> str:
    """Return why rules are unsound, empty if they are sound. `draw` returns hyperparameters drawn at random.

    A rule is unsound if it fails, if it answers the same question in two ways, or if it never applies. Rules are
    unsound together if they leave nothing or next to nothing of the space.
    """
    obeyed, applied, kept, drawn = [0] * len(rules), [False] * len(rules), 0, 0
    while drawn < _MOST_DRAWS and (drawn < _LEAST_DRAWS or kept < _LEAST_OBEYING or not all(applied)):
        params = draw()
        try:
            answers = [rule.call_function(params) for rule in rules]
            again = [rule.call_function(params) for rule in rules]
        except ValueError as error:
            return str(error)
        for rule, answer, other in zip(rules, answers, again, strict=True):
            if other != answer:
                return f"the rule {rule.text!r} does not always answer the same, asked about {params!r}"
        obeyed = [count + (answer is not False) for count, answer in zip(obeyed, answers, strict=True)]
        applied = [before or answer is not None for before, answer in zip(applied, answers, strict=True)]
        kept += False not in answers
        drawn += 1
    for rule, ever in zip(rules, applied, strict=True):
        if not ever:
            return (
                f"the rule {rule.text!r} never applies: it looks up parameters that did not exist together in any of "
                f"{drawn} individuals drawn at random"
            )
    if kept < _LEAST_OBEYING:
        shares = ", ".join(f"{rule.text!r} {count}" for rule, count in zip(rules, obeyed, strict=True))
        return (
            f"the rules of this space leave {'next to ' if kept else ''}nothing: of {drawn} individuals drawn at "
            f"random {kept} obey all of them ({shares}); give parameters values that fit together more often"
        )
    return ""
