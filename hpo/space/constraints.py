"""Constraints between hyperparameters: functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Protocol, TypeVar

_MOST_DRAWS = 10_000
_LEAST_ALLOWED = 10  # draws that must satisfy all constraints: one in a thousand
# Constraints are checked with at least this many draws, so that their errors show.
_LEAST_DRAWS = 200
# Candidates. A request to another process takes 0.1 ms, and 5 us for each candidate.
_MOST_IN_BATCH = 64

T = TypeVar("T")


class ConstraintSet(Protocol):
    """Constraints of a search space, whose functions may be in another process."""

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first violated constraint, or None, for each set."""

    def find_problem(self) -> str:
        """Return why the constraints are unsound, or "" (see `find_constraint_problem`)."""


@dataclass(frozen=True)
class Constraint:
    """A function of the user that decides whether hyperparameters are allowed."""

    function: Callable[[dict[str, Any]], bool]
    """The function. It returns True if hyperparameters are allowed, and False otherwise."""
    text: str
    """The constraint in words, for messages."""
    parameter_names: frozenset[str]
    """The names of all parameters of the space."""

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Return whether the constraint allows hyperparameters.

        The constraint is skipped, and the answer is True, if the function reads an inactive
        parameter. The answer is False if the function fails.
        """
        try:
            return self.call_function(params) is not False
        except ValueError:
            return False

    def call_function(self, params: Mapping[str, Any]) -> bool | None:
        """Call the function, and return its answer; None if it reads an inactive parameter.

        Raises:
            ValueError: The function fails, or returns neither True nor False.
        """
        try:
            answer: Any = self.function(dict(params))
        except (Exception, SystemExit) as error:
            missing = error.args[0] if isinstance(error, KeyError) and error.args else None
            if (
                isinstance(missing, str)
                and missing in self.parameter_names
                and missing not in params
            ):
                return None
            reason = (
                f"there is no parameter {error}" if isinstance(error, KeyError) else repr(error)
            )
            raise ValueError(
                f"the constraint {self.text!r} failed for {dict(params)!r}: {reason}"
            ) from error
        with suppress(Exception):
            answer = answer.item()  # numpy's True
        if type(answer) is not bool:
            raise ValueError(
                f"the constraint {self.text!r} must return True or False, got {answer!r} for "
                f"{dict(params)!r}"
            )
        return answer


class LocalConstraints:
    """Constraints whose functions are called in this process.

    Args:
        draw: A function that returns random hyperparameters, whether or not they satisfy the
            constraints.
    """

    def __init__(self, draw: Callable[[Random], Mapping[str, Any]]) -> None:
        self._draw = draw
        self._constraints: list[Constraint] = []

    def add(self, constraint: Constraint) -> None:
        """Add a constraint."""
        self._constraints.append(constraint)

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first violated constraint, or None, for each set."""
        return [
            next(
                (
                    index
                    for index, constraint in enumerate(self._constraints)
                    if not constraint.allows(params)
                ),
                None,
            )
            for params in batch
        ]

    def find_problem(self) -> str:
        """Return why the constraints are unsound, or "" (see `find_constraint_problem`)."""
        rng = Random(0)
        return find_constraint_problem(self._constraints, lambda: self._draw(rng))


def iterate_batches(
    items: Iterable[T], first_size: int = 1, most_items: int = _MOST_IN_BATCH
) -> Iterator[list[T]]:
    """Yield items in lists. Each list is twice as long as the previous list.

    The first list has `first_size` items, and no list has more than `most_items`. Items are taken
    from `items` only when the next list is requested.
    """
    size, source = first_size, iter(items)
    while batch := list(islice(source, size)):
        yield batch
        size = min(2 * size, most_items)


def find_constraint_problem(
    constraints: Sequence[Constraint], draw: Callable[[], Mapping[str, Any]]
) -> str:
    """Return why constraints are unsound, or "" if they are sound.

    A constraint is unsound if it fails, if it returns different answers for the same
    hyperparameters, or if it always reads an inactive parameter. Constraints are unsound together
    if they allow nothing or next to nothing of the space.

    Args:
        draw: A function that returns random hyperparameters from the whole space.
    """
    allowed_counts, applied = [0] * len(constraints), [False] * len(constraints)
    kept = drawn = 0
    while drawn < _MOST_DRAWS and (
        drawn < _LEAST_DRAWS or kept < _LEAST_ALLOWED or not all(applied)
    ):
        params = draw()
        try:
            answers = [constraint.call_function(params) for constraint in constraints]
            second_answers = [constraint.call_function(params) for constraint in constraints]
        except ValueError as error:
            return str(error)
        for constraint, answer, second_answer in zip(
            constraints, answers, second_answers, strict=True
        ):
            if second_answer != answer:
                return (
                    f"the constraint {constraint.text!r} must always return the same for the same "
                    f"hyperparameters, got two answers for {params!r}"
                )
        allowed_counts = [
            count + (answer is not False)
            for count, answer in zip(allowed_counts, answers, strict=True)
        ]
        applied = [
            before or answer is not None for before, answer in zip(applied, answers, strict=True)
        ]
        kept += False not in answers
        drawn += 1
    for constraint, has_applied in zip(constraints, applied, strict=True):
        if not has_applied:
            return (
                f"the constraint {constraint.text!r} never applies: it reads parameters that were "
                f"not active together in any of {drawn} individuals drawn at random"
            )
    if kept < _LEAST_ALLOWED:
        counts = ", ".join(
            f"{constraint.text!r} {count}"
            for constraint, count in zip(constraints, allowed_counts, strict=True)
        )
        return (
            f"the constraints of this space leave {'next to ' if kept else ''}nothing: of {drawn} "
            f"individuals drawn at random {kept} satisfy all of them ({counts}). Give the "
            "parameters values that fit together more often"
        )
    return ""
