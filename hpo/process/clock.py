"""Time without the gaps in which this process was stopped, perhaps with its whole job.

Schedulers suspend jobs, and resume them later. A rank that waits for a peer must not count that time.
"""

from __future__ import annotations

import threading
import time

_MIN_GAP = 2.0  # seconds in which no thread looked at the clock; the watch's thread does ten times a second
_BUSY_RATIO = 0.2  # of a gap: native code that holds Python's lock uses CPU time in it, and a stopped process does not


class Clock:
    """Counts the seconds in which this process was not stopped; a thread must look at it at least every two seconds.

    ``now()`` and ``lost()``, the seconds left out so far, may be asked from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at, self._cpu_seconds = time.monotonic(), time.process_time()
        self._lost_seconds = 0.0

    def now(self) -> float:
        """Return the seconds since some moment in the past, without those in which this process was stopped."""
        with self._lock:
            now, used = time.monotonic(), time.process_time()
            gap = now - self._read_at
            if gap > _MIN_GAP and used - self._cpu_seconds < _BUSY_RATIO * gap:
                self._lost_seconds += gap
            self._read_at, self._cpu_seconds = now, used
            return now - self._lost_seconds

    def measure_lost(self) -> float:
        """Return the seconds in which this process was stopped."""
        self.now()
        return self._lost_seconds


_clock = Clock()
now = _clock.now
measure_lost = _clock.measure_lost
