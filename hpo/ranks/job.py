"""One rank of an MPI job, with what watches over it and what marks its output."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from hpo.errors import Exit, OutageError, RunError, UsageError
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.watch import Watch


@dataclass(frozen=True)
class Job:
    """One rank of a job: the communicator of all ranks, the rank's watch, and the template that it has started, if any.

    `started` is when this was made, in seconds since the epoch.
    """

    world: SleepingComm
    watch: Watch
    template: Any = None
    started: float = field(default_factory=time.time)

    @property
    def is_first(self) -> bool:
        """Whether this is the job's first rank, which alone reads options and speaks to a person."""
        return bool(self.world.rank == 0)


def die_of(watch: Watch, error: BaseException) -> None:
    """End the whole job at once with a message, or the traceback of a bug, and the status that goes with it."""
    stopped = watch.stopping.status if watch.stopping and isinstance(error, OutageError) else 0
    is_told = isinstance(error, (UsageError, RunError))
    text = f"error: {error}" if is_told else "".join(traceback.format_exception(error)).rstrip()
    watch.die(text, stopped or Exit.CRASHED)
