"""How fast evaluations end, and how long those that are left will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MIN_RECENT = 20  # evaluations from which the pace is computed, or twice as many as are running


@dataclass(frozen=True)
class Pace:
    """Evaluations per minute, and the seconds that are left; None where they are not known."""

    per_minute: float | None = None
    seconds_left: float | None = None


def compute_pace(evaluations: Sequence[Evaluation], remaining: int, session_start: float, now: float | None) -> Pace:
    """Return the pace at which this session, which began at `since`, has ended its last evaluations.

    `since` and `now` are seconds since the epoch. The time since the last end counts, so that a run which hangs is seen
    to be slow. `to_do` is how many evaluations are left. `now` is None where the run does not go on: then the pace is
    that of the whole session, and the seconds that are left are None.
    """
    ours = [evaluation for evaluation in evaluations if evaluation.started >= session_start]
    ended = sorted(
        (evaluation for evaluation in ours if evaluation.counts_for_budget), key=lambda evaluation: evaluation.ended
    )
    running = [evaluation for evaluation in ours if evaluation.state == "running"]
    recent = ended[-max(_MIN_RECENT, 2 * len(running)) :] if now is not None else ended
    if not recent:
        return Pace()
    whole = len(recent) == len(ended)
    start = min(evaluation.started for evaluation in ours) if whole else ended[-len(recent) - 1].ended
    seconds = max(ended[-1].ended, now or 0.0) - start
    if seconds <= 0:
        return Pace()
    per_minute = 60 * len(recent) / seconds
    if now is None:
        return Pace(per_minute)
    # What is running is partly done. Without it, the first of 100 workers to end would predict 100 times too much.
    typical = sum(max(0.0, evaluation.ended - evaluation.started) for evaluation in recent) / len(recent)
    begun = (
        sum(min(1.0, max(0.0, now - evaluation.started) / typical) for evaluation in running) if typical > 0 else 0.0
    )
    return Pace(per_minute, max(0.0, remaining - begun) * seconds / (len(recent) + (begun if whole else 0.0)))
