"""One rank of an MPI job, with what watches over it and what marks its output."""

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
    """One rank of a job: the communicator of all ranks, the rank's watch, and the template that it has started, if any.

    `started` is when this was made, in seconds since the epoch.
    """

    world: SleepingComm
    watch: RankWatch
    template: Any = None
    started_at: float = field(default_factory=time.time)

    @property
    def is_first(self) -> bool:
        """Whether this is the job's first rank, which alone reads options and speaks to a person."""
        return bool(self.world.rank == 0)


def abort_for_error(watch: RankWatch, error: BaseException) -> None:
    """End the whole job at once with a message, or the traceback of a bug, and the status that goes with it."""
    stopped = watch.active_stop.status if watch.active_stop and isinstance(error, StorageUnavailableError) else 0
    is_told = isinstance(error, (UsageError, RunError))
    text = f"error: {error}" if is_told else "".join(traceback.format_exception(error)).rstrip()
    watch.abort_job(text, stopped or ExitStatus.CRASHED)
