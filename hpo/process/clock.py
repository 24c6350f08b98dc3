"""Time as this process has lived it: without gaps in which it was stopped, perhaps with its whole job.

Schedulers suspend jobs, and go on with them later. Whoever waits for a peer is not to take that time for the peer's.
"""

from __future__ import annotations

import threading
import time

_GAP = 2.0  # seconds in which nobody looked at the clock; the watch over a rank does ten times a second
_BUSY = 0.2  # of a gap: native code that keeps Python's lock computes meanwhile, and who is stopped does not


class Clock:
    """Counts the seconds in which this process was not stopped; for as long as some thread looks at it again and again.

    ``now()`` and ``lost()``, the seconds left out so far, may be asked from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_at, self._used = time.monotonic(), time.process_time()
        self._lost = 0.0

    def now(self) -> float:
        """Return the seconds since some moment in the past, without those in which this process was stopped."""
        with self._lock:
            now, used = time.monotonic(), time.process_time()
            gap = now - self._looked_at
            if gap > _GAP and used - self._used < _BUSY * gap:
                self._lost += gap
            self._looked_at, self._used = now, used
            return now - self._lost

    def lost(self) -> float:
        """Return the seconds in which this process was stopped."""
        self.now()
        return self._lost


_clock = Clock()
now = _clock.now
lost = _clock.lost
