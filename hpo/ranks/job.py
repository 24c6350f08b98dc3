"""One rank of an MPI job, with the watch over it, and steps on which all ranks agree."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpo.errors import (
    CollectiveUsageError,
    ExitStatus,
    RunError,
    StorageUnavailableError,
    UsageError,
)
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.rank_watch import RankWatch

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One rank of an MPI job."""

    world: SleepingComm
    """Communicator of all ranks."""
    watch: RankWatch
    """The watch over this rank."""
    template: Any = None
    """The template that this rank has started, if any."""
    started_at: float = field(default_factory=time.time)
    """Start of the job, in seconds since the epoch."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which alone reads options and prints to the user."""
        return bool(self.world.rank == 0)


def abort_for_error(watch: RankWatch, error: BaseException) -> None:
    """End the whole job because of an error, and print its message, or the traceback of a bug."""
    if isinstance(error, (UsageError, RunError)):
        text = f"error: {error}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    status: int = ExitStatus.CRASHED
    if watch.active_stop and isinstance(error, StorageUnavailableError):
        status = watch.active_stop.status or status
    watch.abort_job(text, status)


def run_on_all(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Run `step` on each rank of `comm`, and return the result of this rank. Collective.

    An exception other than UsageError is raised only on its own rank, while the others wait. It
    must end the job.

    Raises:
        CollectiveUsageError: `step` has raised UsageError on any rank.
    """
    result = None
    mistake = None
    try:
        result = step()
    except UsageError as error:
        mistake = str(error)
    if mistakes := comm.allgather_given(mistake):
        raise CollectiveUsageError(mistakes[0])
    return result  # type: ignore[return-value]


def run_on_root(comm: SleepingComm, step: Callable[[], T]) -> T:
    """Run `step` on the first rank of `comm`, and return its result on all ranks. Collective.

    Raises:
        CollectiveUsageError: `step` has raised UsageError.
    """
    result = run_on_all(comm, lambda: step() if comm.rank == 0 else None)
    return comm.bcast(result)  # type: ignore[no-any-return]
