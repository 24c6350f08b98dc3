"""The time and the number of evaluations of a session (one start of the run), and which of them is scarce."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TimeBudget:
    """The time limit of a session, and the number of evaluations that it may run."""

    seconds: float
    """The time limit; infinite without one."""
    evaluations: int
    """The number of evaluations that are left at the start."""
    started: float
    """The start, by `time.monotonic`."""
    now: Callable[[], float] = time.monotonic

    def compute_scarcity(self, ended: int) -> float:
        """Return how scarce time is: 0 if all evaluations will end in time, otherwise the share of time that is left.

        Args:
            ended: The number of evaluations that have ended in this session.
        """
        passed = self.now() - self.started
        if math.isinf(self.seconds):
            return 0.0
        will_end_in_time = not ended or passed * self.evaluations / ended <= self.seconds
        return 0.0 if will_end_in_time or passed >= self.seconds else 1 - passed / self.seconds
