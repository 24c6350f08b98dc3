"""Whether a run stops, and why.

The first reason counts. Only the reason that the budget is spent can be replaced by another reason.
"""

from __future__ import annotations

import math

from hpo.errors import ExitStatus, StopRequest
from hpo.process import clock


class RunStop:
    """The state of a run's stop: whether the run stops, why, and since when.

    Attributes:
        reason: Why the run stops; None while it does not stop.
    """

    def __init__(self) -> None:
        self.reason: StopRequest | None = None
        self._began_at = math.inf
        self._cancelled_stops: set[StopRequest] = set()

    def begin_stop(self, stop: StopRequest) -> bool:
        """Stop the run for a reason; return false if `is_final(stop)`, or if this reason was cancelled before."""
        if self.is_final(stop) or stop in self._cancelled_stops:
            return False
        self._began_at = clock.now()
        self.reason = stop
        return True

    def cancel_stop(self, stop: StopRequest) -> None:
        """End a stop, so that the run can continue after the search. Call it when all ranks have ended the search.

        Late messages that request the same stop are ignored.
        """
        self._cancelled_stops.add(stop)
        if self.reason == stop:
            self.reason = None
            self._began_at = math.inf

    def is_final(self, stop: StopRequest) -> bool:
        """Return whether the run stops already, for a reason that `stop` does not replace."""
        ends_well = self.reason is not None and self.reason.status == ExitStatus.BUDGET_SPENT
        return self.reason is not None and not (
            ends_well and stop.status != ExitStatus.BUDGET_SPENT
        )

    def measure_seconds(self) -> float:
        """Return the seconds since the run began to stop; negative infinity if it does not stop."""
        return clock.now() - self._began_at
