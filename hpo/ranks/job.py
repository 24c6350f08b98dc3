"""One rank of an MPI job, with what watches over it and what marks its output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hpo.process.printed import Printed
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.watch import Watch


@dataclass(frozen=True)
class Job:
    """One rank of a job: the communicator of all ranks, the rank's watch, and its standard streams.

    `started` is when this was made, in seconds since the epoch.
    """

    world: SleepingComm
    watch: Watch
    printed: Printed
    started: float = field(default_factory=time.time)

    @property
    def is_first(self) -> bool:
        """Whether this is the job's first rank, which alone reads options and speaks to a person."""
        return bool(self.world.rank == 0)
