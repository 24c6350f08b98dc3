"""Which evaluations deserve more workers, and for how long they will still go on, as the record knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation, group_by_individual
from hpo.store.successive_halving import HalvingSchedule


@dataclass(frozen=True)
class ExpandableEvaluation:
    """An evaluation that is promoted, of this `worker`, which may have more; it has a loss within `wait` seconds."""

    trial: int
    worker: int
    max_wait: float


@dataclass(frozen=True)
class HelpPeriod:
    """The time in which a `worker` helped with an evaluation of another one, in seconds since the epoch.

    It has helped it on from there, `after` how many losses.
    """

    worker: int
    start: float
    stop: float
    from_step: int


def find_help_periods(evaluation: Evaluation, until: float) -> list[HelpPeriod]:
    """Return who helped with an evaluation, and when; those that are at it now do so `until` now, or its end."""
    ends = [*(min(team["at"], until) for team in evaluation.worker_groups[1:]), until]
    return [
        HelpPeriod(worker, team["at"], end, team["after"])
        for team, end in zip(evaluation.worker_groups, ends, strict=False)
        for worker in team["workers"]
        if worker != evaluation.worker and end > team["at"]
    ]


def estimate_losses_left(evaluations: Sequence[Evaluation], losses: int) -> int:
    """Return how many losses an evaluation will still have, after so many, if it is as long as the longest complete.

    Where none is complete, or it is longer by now, it is taken to be halfway (Gott, "Implications of the Copernican
    principle for our future prospects", 1993).
    """
    longest = max((max(one.curve, default=0) for one in evaluations if one.state == "complete"), default=0)
    return longest - losses if longest >= losses else losses


def find_expandable(
    halving: HalvingSchedule, evaluations: Sequence[Evaluation], now: float
) -> list[ExpandableEvaluation]:
    """Return the evaluations that have passed rungs, and that others may help, which is worth the wait.

    For each rung that it has passed, an evaluation has twice the workers. Who helps waits for its next loss; what is
    gained is half of the time from there to the next rung. `now` is in seconds since the epoch.
    """
    found = []
    for root, group in group_by_individual(evaluations).items():
        one = group[-1]
        losses = max(one.curve, default=0)
        if one.state != "running" or losses <= one.resumed_from_step:
            continue
        passed, rung = halving.locate_in_rungs(root, losses)
        if 2 * len(one.workers) > 2**passed:
            continue
        left = min(rung - losses, estimate_losses_left(evaluations, losses)) - 1
        if left > 2:
            wait = max(0.0, now - one.started) / (losses - one.resumed_from_step)
            found.append(ExpandableEvaluation(one.trial, one.worker, wait))
    return found
