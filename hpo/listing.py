"""List all individuals of a search space, if they are few enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING

from hpo.constraint_set import iterate_batches

if TYPE_CHECKING:
    from hpo.parameters import Value
    from hpo.space import SearchSpace

_MOST_IN_BATCH = 1000  # candidates that are checked against the constraints at once
_MOST_LISTED = 100_000  # individuals


def list_individuals(
    space: SearchSpace, most_candidates: float, most_seconds: float, is_stopping: Callable[[], bool] = lambda: False
) -> list[dict[str, Value]] | None:
    """Return the hyperparameters of every individual that the constraints of a space allow.

    Args:
        most_candidates: Give up after this number of candidates, whether or not constraints allow them.
        most_seconds: Give up after this time, since constraints may be slow.
        is_stopping: A function that returns whether to give up now.

    Returns:
        The hyperparameters of all individuals. None if there are infinitely many or too many, or if the list takes too
        long.
    """
    if any(parameter.size == math.inf for parameter in space.parameters.values()):
        return None
    found: list[dict[str, Value]] = []
    candidate_count, deadline = 0, time.monotonic() + most_seconds
    for batch in iterate_batches(_list_remaining(space, list(space.parameters), {}), most_items=_MOST_IN_BATCH):
        found += compress(batch, space.are_allowed(batch))
        candidate_count += len(batch)
        is_late = time.monotonic() > deadline or is_stopping()
        if candidate_count > most_candidates or len(found) > _MOST_LISTED or is_late:
            return None
    return found


def _list_remaining(space: SearchSpace, names: Sequence[str], before: dict[str, Value]) -> Iterator[dict[str, Value]]:
    if not names:
        yield before
    elif space.is_active(names[0], before):
        for value in space.parameters[names[0]].list_values():
            yield from _list_remaining(space, names[1:], {**before, names[0]: value})
    else:
        yield from _list_remaining(space, names[1:], before)
