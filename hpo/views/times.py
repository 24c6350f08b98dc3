"""Compute the times of a run: its pace, its remaining time, and the time in which it worked."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MIN_RECENT = 20  # evaluations in the pace; more if more than 10 are running, twice their number


@dataclass(frozen=True)
class SessionTimes:
    """Times of a session in seconds since the epoch."""

    started_at: float
    stops_at: float = math.inf
    """When it is stopped, by its time limit or the end of its job."""
    then: str = ""
    """The option whose evaluations follow."""


@dataclass(frozen=True)
class Pace:
    """Speed of a run."""

    per_minute: float | None = None
    """Ended evaluations per minute; None if unknown."""
    seconds_left: float | None = None
    """Estimated number of seconds until the run ends; None if unknown."""


def compute_pace(
    evaluations: Sequence[Evaluation], remaining: int, session_start: float, now: float | None
) -> Pace:
    """Compute the pace of the latest evaluations of this session, and the remaining time.

    The time since the latest end of an evaluation counts too. If the run hangs, the pace therefore
    drops.

    If the run is not active (`now` is None), the pace is that of the whole session, and no
    remaining time is computed. All times are in seconds since the epoch.
    """
    ours = [evaluation for evaluation in evaluations if evaluation.started >= session_start]
    ended = [evaluation for evaluation in ours if evaluation.counts_for_budget]
    ended.sort(key=lambda evaluation: evaluation.ended)
    running = [evaluation for evaluation in ours if evaluation.state == "running"]
    recent = ended[-max(_MIN_RECENT, 2 * len(running)) :] if now is not None else ended
    if not recent:
        return Pace()
    is_whole = len(recent) == len(ended)
    start = min(e.started for e in ours) if is_whole else ended[-len(recent) - 1].ended
    seconds = max(ended[-1].ended, now or 0.0) - start
    if seconds <= 0:
        return Pace()
    per_minute = 60 * len(recent) / seconds
    if now is None:
        return Pace(per_minute)
    # Running evaluations count in part. Otherwise the first estimate with 100 workers would be 100
    # times too long.
    typical = sum(max(0.0, e.ended - e.started) for e in recent) / len(recent)
    begun = 0.0
    if typical > 0:
        begun = sum(min(1.0, max(0.0, now - e.started) / typical) for e in running)
    done = len(recent) + (begun if is_whole else 0.0)
    return Pace(per_minute, max(0.0, remaining - begun) * seconds / done)


def compute_end(evaluation: Evaluation, now: float | None) -> float:
    """Return the end of an evaluation, in seconds since the epoch; `now` for a running evaluation.

    If the end of an interrupted evaluation is unknown, its start is returned. If `now` is None, the
    run is not active, and the start of a running evaluation is returned. The end is never before
    the start, even if the clock was set back.
    """
    stop = now if evaluation.state == "running" else evaluation.ended
    is_unknown = evaluation.state == "interrupted" and math.isnan(evaluation.seconds)
    if stop is None or is_unknown:
        return evaluation.started
    return max(evaluation.started, stop)


class WorkingTime:
    """The time in which at least one worker evaluated, as periods with pauses between them.

    Imported evaluations are ignored. `now` is None if the run is not active.

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
        """Return the working time until `moment`, in seconds. `moment` counts from the epoch."""
        index = bisect_right(self.spans, (moment, math.inf)) - 1
        if index < 0:
            return 0.0
        start, stop = self.spans[index]
        return self._seconds_before[index] + min(moment, stop) - start
