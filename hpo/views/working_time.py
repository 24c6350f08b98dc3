"""When a run worked: the time in which any of its workers evaluated something."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from hpo.store.evaluations import Evaluation


def compute_end(evaluation: Evaluation, now: float | None) -> float:
    """Return when an evaluation ended, in seconds since the epoch; a running one counts as ended at `now`.

    Where no end is known, the start is returned: for an interrupted evaluation, for a running one if `now` is None
    since the run does not go on, and for one that ended before it began, by a clock that was set meanwhile.
    """
    stop = now if evaluation.state == "running" else evaluation.ended
    if stop is None or evaluation.state == "interrupted":
        return evaluation.started
    return max(evaluation.started, stop)


class WorkingTime:
    """The time of a run without the pauses in which nothing was evaluated.

    `spans` are the times between pauses, in order, as pairs of seconds since the epoch; `total` is their length in
    seconds. `now` is None where the run does not go on.
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
        """Return the seconds of working time up to a moment in which something was evaluated."""
        index = bisect_right(self.spans, (moment, math.inf)) - 1
        if index < 0:
            return 0.0
        start, stop = self.spans[index]
        return self._seconds_before[index] + min(moment, stop) - start
