"""Time without the gaps in which this process was stopped, perhaps with its whole job.

Schedulers suspend jobs, and resume them later. A rank that waits for a peer must not count that time.
"""

from __future__ import annotations

import threading
import time

_GAP = 2.0  # seconds in which no thread looked at the clock; the watch's thread does ten times a second
_BUSY = 0.2  # of a gap: native code that holds Python's lock uses CPU time in it, and a stopped process does not


class Clock:
    """Counts the seconds in which this process was not stopped; a thread must look at it at least every two seconds.

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
