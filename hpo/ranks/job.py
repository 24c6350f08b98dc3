"""One rank of an MPI job, with the watch (the thread that handles signals, deadlines and messages) over it."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from hpo.errors import ExitStatus, RunError, StorageUnavailableError, UsageError
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.rank_watch import RankWatch


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
    """End the whole job at once because of an error, and print its message, or its traceback if it is a bug."""
    stopped = watch.active_stop.status if watch.active_stop and isinstance(error, StorageUnavailableError) else 0
    is_expected = isinstance(error, (UsageError, RunError))
    text = f"error: {error}" if is_expected else "".join(traceback.format_exception(error)).rstrip()
    watch.abort_job(text, stopped or ExitStatus.CRASHED)
