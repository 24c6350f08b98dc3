"""Compute the working time of a run: the time in which at least one worker evaluates."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from hpo.store.evaluations import Evaluation


def compute_end(evaluation: Evaluation, now: float | None) -> float:
    """Return the end of an evaluation, in seconds since the epoch; `now` for a running evaluation.

    The end of an interrupted evaluation is unknown, so its start is returned. If `now` is None, the
    run is not active, and the start of a running evaluation is returned. The end is never before
    the start, even if the clock was set back.
    """
    stop = now if evaluation.state == "running" else evaluation.ended
    if stop is None or evaluation.state == "interrupted":
        return evaluation.started
    return max(evaluation.started, stop)


class WorkingTime:
    """The time in which at least one worker evaluated, as periods with pauses between them.

    Args:
        evaluations: Evaluations of the run; imported ones are ignored.
        now: Current time, in seconds since the epoch; None if the run is not active.

    Attributes:
        spans: Start and end of each period, in order, in seconds since the epoch.
        total: Sum of the lengths of all periods, in seconds.
    """

    def __init__(self, evaluations: Iterable[Evaluation], now: float | None) -> None:
        times = sorted(
            (evaluation.started, compute_end(evaluation, now))
            for evaluation in evaluations
            if not evaluation.imported_from and math.isfinite(evaluation.started)
        )
        self.spans: list[tuple[float, float]] = []
        for start, stop in times:
            if not self.spans or start > self.spans[-1][1]:
                self.spans.append((start, stop))
            elif stop > self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], stop)
        self._seconds_before: list[float] = []
        self.total = 0.0
        for start, stop in self.spans:
            self._seconds_before.append(self.total)
            self.total += stop - start

    def compute_seconds(self, moment: float) -> float:
        """Return the working time of the run until `moment`, in seconds. `moment` is in seconds since the epoch."""
        index = bisect_right(self.spans, (moment, math.inf)) - 1
        if index < 0:
            return 0.0
        start, stop = self.spans[index]
        return self._seconds_before[index] + min(moment, stop) - start
