"""A clock that does not count the time in which this process was stopped.

Schedulers suspend jobs, and resume them later. A rank that waits for a peer must not count that
time.
"""

from __future__ import annotations

import os
import threading
import time

# Seconds without a reading; the thread of the watch reads the clock ten times a second.
_MIN_GAP = 2.0
# CPU time in a gap, relative to the gap, from which on the process was not stopped. Native code
# that holds Python's global interpreter lock uses CPU time, and a stopped process does not.
_BUSY_RATIO = 0.2


class Clock:
    """Counts the seconds in which this process was not stopped. Any thread may use it.

    A thread must read it at least every 2 seconds, since a longer gap without CPU time counts as a
    stop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._cpu_seconds = time.process_time()
        self._lost_seconds = 0.0

    def now(self) -> float:
        """Return the seconds since a fixed time in the past, without those of stops."""
        with self._lock:
            now = time.monotonic()
            used = time.process_time()
            gap = now - self._read_at
            if gap > _MIN_GAP and used - self._cpu_seconds < _BUSY_RATIO * gap:
                self._lost_seconds += gap
            self._read_at = now
            self._cpu_seconds = used
            return now - self._lost_seconds

    def replace_lock(self) -> None:
        """Replace the lock, which another thread may have held when this process was forked."""
        self._lock = threading.Lock()

    def measure_lost(self) -> float:
        """Return the total seconds in which this process was stopped."""
        self.now()
        return self._lost_seconds


_clock = Clock()
os.register_at_fork(after_in_child=_clock.replace_lock)
now = _clock.now
measure_lost = _clock.measure_lost
