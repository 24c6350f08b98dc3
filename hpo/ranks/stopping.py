"""Whether a whole run is to stop, and why: the first reason counts, but an end with success can be overruled."""

from __future__ import annotations

import math

from hpo.errors import Exit, Stop
from hpo.process import clock


class Stopping:
    """The stop of a run; ``reason`` is None while it goes on."""

    def __init__(self) -> None:
        self.reason: Stop | None = None
        self._since = math.inf
        self._forgotten: Stop | None = None

    def begin(self, stop: Stop) -> bool:
        """Stop for a reason, and return true; false where that changes nothing."""
        if self.is_final(stop) or stop == self._forgotten:
            return False
        self._since = clock.now()
        self.reason = stop
        return True

    def forget(self, stop: Stop) -> None:
        """Go on after a stop, once all ranks have stopped; messages of it that still come are ignored."""
        self._forgotten = stop
        if self.reason == stop:
            self.reason, self._since = None, math.inf

    def is_final(self, stop: Stop) -> bool:
        """Tell whether the run is stopping already, and for a reason that this one does not overrule."""
        ends_well = self.reason is not None and self.reason.status == Exit.BUDGET_SPENT
        return self.reason is not None and not (ends_well and stop.status != Exit.BUDGET_SPENT)

    def seconds(self) -> float:
        """Return the seconds for which the run has been stopping."""
        return clock.now() - self._since
