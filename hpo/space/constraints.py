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
        """Return why the constraints are unsound, or "" if they are sound."""


@dataclass(frozen=True)
class Constraint:
    """A function of the user that decides whether hyperparameters are allowed."""

    function: Callable[[dict[str, Any]], bool]
    text: str
    """The constraint in words, for messages."""
    parameter_names: frozenset[str]
    """The names of all parameters of the space."""

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Return the answer of the function: True if it is skipped, and False if it fails.

        It is skipped if it reads an inactive parameter.
        """
        try:
            return self.call_function(params) is not False
        except ValueError:
            return False

    def call_function(self, params: Mapping[str, Any]) -> bool | None:
        """Call the function, and return its answer; None if it reads an inactive parameter.

        Raise a ValueError if the function fails, or returns neither True nor False.
        """
        try:
            answer: Any = self.function(dict(params))
        except (Exception, SystemExit) as error:
            reason = repr(error)
            if isinstance(error, KeyError):
                inactive = self.parameter_names - params.keys()
                if error.args and isinstance(error.args[0], str) and error.args[0] in inactive:
                    return None
                reason = f"there is no parameter {error}"
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

    The hyperparameters that `draw` returns are random, and may violate the constraints.
    """

    def __init__(self, draw: Callable[[Random], Mapping[str, Any]]) -> None:
        self._draw = draw
        self.constraints: list[Constraint] = []

    def find_violated(self, batch: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the first violated constraint, or None, for each set."""
        violated: list[int | None] = []
        for params in batch:
            failing = (i for i, each in enumerate(self.constraints) if not each.allows(params))
            violated.append(next(failing, None))
        return violated

    def find_problem(self) -> str:
        """Return why the constraints are unsound, or "" if they are sound.

        A constraint is unsound if it fails, if it returns different answers for the same
        hyperparameters, or if it always reads an inactive parameter. Constraints are unsound
        together if they allow nothing or next to nothing of the space.
        """
        rng = Random(0)
        allowed_counts = [0] * len(self.constraints)
        applied_counts = [0] * len(self.constraints)
        kept = 0
        drawn = 0
        while drawn < _MOST_DRAWS and (
            drawn < _LEAST_DRAWS or kept < _LEAST_ALLOWED or not all(applied_counts)
        ):
            params = self._draw(rng)
            try:
                answers = [each.call_function(params) for each in self.constraints]
                second_answers = [each.call_function(params) for each in self.constraints]
            except ValueError as error:
                return str(error)
            for index, (answer, second_answer) in enumerate(
                zip(answers, second_answers, strict=True)
            ):
                if second_answer != answer:
                    return (
                        f"the constraint {self.constraints[index].text!r} must always return the "
                        f"same for the same hyperparameters, got two answers for {params!r}"
                    )
                allowed_counts[index] += answer is not False
                applied_counts[index] += answer is not None
            kept += False not in answers
            drawn += 1
        texts = [constraint.text for constraint in self.constraints]
        if not all(applied_counts):
            return (
                f"the constraint {texts[applied_counts.index(0)]!r} never applies: it reads "
                f"parameters that were not active together in any of {drawn} individuals drawn at "
                "random"
            )
        if kept < _LEAST_ALLOWED:
            counts = zip(texts, allowed_counts, strict=True)
            return (
                f"the constraints of this space leave {'next to ' if kept else ''}nothing: of "
                f"{drawn} individuals drawn at random {kept} satisfy all of them "
                f"({', '.join(f'{text!r} {count}' for text, count in counts)}). Give the "
                "parameters values that fit together more often"
            )
        return ""


def iterate_batches(
    items: Iterable[T], first_size: int = 1, most_items: int = _MOST_IN_BATCH
) -> Iterator[list[T]]:
    """Yield items in lists. Each list is twice as long as the previous list.

    The first list has `first_size` items, and no list has more than `most_items`. Items are taken
    from `items` only when the next list is requested.
    """
    size = first_size
    source = iter(items)
    while batch := list(islice(source, size)):
        yield batch
        size = min(2 * size, most_items)
