"""Steps that all ranks take together, or one rank for all, and how a mistake that one rank finds reaches all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpo.errors import CollectiveUsageError, UsageError
from hpo.ranks.communicator import SleepingComm

T = TypeVar("T")


def run_on_all(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Take a step on every rank, and return its result; where it raises UsageError on any, raise AgreedError on all."""
    result, mistake = None, None
    try:
        result = step()
    except UsageError as error:
        mistake = str(error)
    mistakes = [mistake for mistake in comm.allgather(mistake) if mistake is not None]
    if mistakes:
        raise CollectiveUsageError(mistakes[0])
    return result  # type: ignore[return-value]


def run_on_root(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Take a step on the first rank, and return its result on all."""
    result = run_on_all(comm, lambda: step() if comm.rank == 0 else None)
    return comm.bcast(result)  # type: ignore[no-any-return]
