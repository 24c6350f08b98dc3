"""Run a function on all ranks, or on the first rank only, and raise a UsageError of any rank on all ranks.

Any other exception is raised only on its own rank, while the other ranks wait. It must end the job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpo.errors import CollectiveUsageError, UsageError
from hpo.ranks.communicator import SleepingComm

T = TypeVar("T")


def run_on_all(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Run `step` on each rank, and return the result of this rank. Collective: call on all ranks of `comm`.

    Raises:
        CollectiveUsageError: `step` has raised UsageError on any rank.
    """
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
    """Run `step` on the first rank, and return its result on all ranks. Collective: call on all ranks of `comm`.

    Raises:
        CollectiveUsageError: `step` has raised UsageError.
    """
    result = run_on_all(comm, lambda: step() if comm.rank == 0 else None)
    return comm.bcast(result)  # type: ignore[no-any-return]
