"""Whether a whole run is to stop, and why: the first reason counts, but an end with success can be overruled."""

from __future__ import annotations

import math

from hpo.errors import ExitStatus, StopRequest
from hpo.process import clock


class RunStop:
    """The stop of a run; ``reason`` is None while it goes on."""

    def __init__(self) -> None:
        self.reason: StopRequest | None = None
        self._began_at = math.inf
        self._ignored_stop: StopRequest | None = None

    def begin_stop(self, stop: StopRequest) -> bool:
        """Stop for a reason, and return true; false where that changes nothing."""
        if self.is_final(stop) or stop == self._ignored_stop:
            return False
        self._began_at = clock.now()
        self.reason = stop
        return True

    def cancel_stop(self, stop: StopRequest) -> None:
        """Go on after a stop, once all ranks have stopped; messages of it that still come are ignored."""
        self._ignored_stop = stop
        if self.reason == stop:
            self.reason, self._began_at = None, math.inf

    def is_final(self, stop: StopRequest) -> bool:
        """Tell whether the run is stopping already, and for a reason that this one does not overrule."""
        ends_well = self.reason is not None and self.reason.status == ExitStatus.BUDGET_SPENT
        return self.reason is not None and not (ends_well and stop.status != ExitStatus.BUDGET_SPENT)

    def measure_seconds(self) -> float:
        """Return the seconds for which the run has been stopping."""
        return clock.now() - self._began_at
