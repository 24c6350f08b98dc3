"""Compute the number of evaluations per minute, and estimate the remaining time of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MIN_RECENT = 20  # evaluations in the pace; more if more than 10 are running, twice their number


@dataclass(frozen=True)
class Pace:
    """Ended evaluations per minute, and the estimated number of seconds until the run ends; None if unknown."""

    per_minute: float | None = None
    seconds_left: float | None = None


def compute_pace(
    evaluations: Sequence[Evaluation], remaining: int, session_start: float, now: float | None
) -> Pace:
    """Compute the pace of the latest evaluations of this session, and the remaining time.

    The time since the latest end of an evaluation counts too. If the run hangs, the pace therefore
    drops.

    Args:
        evaluations: Evaluations of the run, also of earlier sessions.
        remaining: Number of evaluations still to be done.
        session_start: Start of this session, in seconds since the epoch.
        now: Current time, in seconds since the epoch; None if the run is not active. Then the pace
            is that of the whole session, and no remaining time is computed.
    """
    ours = [evaluation for evaluation in evaluations if evaluation.started >= session_start]
    ended = sorted(
        (evaluation for evaluation in ours if evaluation.counts_for_budget),
        key=lambda evaluation: evaluation.ended,
    )
    running = [evaluation for evaluation in ours if evaluation.state == "running"]
    recent = ended[-max(_MIN_RECENT, 2 * len(running)) :] if now is not None else ended
    if not recent:
        return Pace()
    whole = len(recent) == len(ended)
    start = (
        min(evaluation.started for evaluation in ours) if whole else ended[-len(recent) - 1].ended
    )
    seconds = max(ended[-1].ended, now or 0.0) - start
    if seconds <= 0:
        return Pace()
    per_minute = 60 * len(recent) / seconds
    if now is None:
        return Pace(per_minute)
    # Running evaluations count in part. Otherwise the first estimate with 100 workers would be 100
    # times too long.
    typical = sum(max(0.0, evaluation.ended - evaluation.started) for evaluation in recent) / len(
        recent
    )
    begun = (
        sum(min(1.0, max(0.0, now - evaluation.started) / typical) for evaluation in running)
        if typical > 0
        else 0.0
    )
    return Pace(
        per_minute,
        max(0.0, remaining - begun) * seconds / (len(recent) + (begun if whole else 0.0)),
    )
