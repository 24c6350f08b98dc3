"""Find running evaluations that more workers should join, and estimate how many losses they will still report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation, group_by_individual
from hpo.store.successive_halving import HalvingSchedule


@dataclass(frozen=True)
class ExpandableEvaluation:
    """Describe a running evaluation that more workers (groups of ranks) may join.

    Attributes:
        trial: Number of the trial.
        worker: Worker that started the evaluation.
        max_wait: Mean seconds per loss so far. Workers join at the next loss, so they wait for about this time at most.
    """

    trial: int
    worker: int
    max_wait: float


@dataclass(frozen=True)
class HelpPeriod:
    """Describe a period in which a worker helped to run an evaluation that another worker had started.

    Attributes:
        worker: Worker that helped.
        start: Start, in seconds since the epoch.
        stop: End, in seconds since the epoch.
        from_step: Number of losses that the evaluation had reported at the start.
    """

    worker: int
    start: float
    stop: float
    from_step: int


def find_help_periods(evaluation: Evaluation, until: float) -> list[HelpPeriod]:
    """Return the periods in which other workers helped with an evaluation.

    Periods that have not ended by `until`, in seconds since the epoch, end at `until`.
    """
    ends = [*(min(group["at"], until) for group in evaluation.worker_groups[1:]), until]
    return [
        HelpPeriod(worker, group["at"], end, group["after"])
        for group, end in zip(evaluation.worker_groups, ends, strict=False)
        for worker in group["workers"]
        if worker != evaluation.worker and end > group["at"]
    ]


def estimate_losses_left(evaluations: Sequence[Evaluation], losses: int) -> int:
    """Estimate how many more losses an evaluation will report after `losses` losses.

    The evaluation is assumed to become as long as the longest complete evaluation in `evaluations`. If `losses` is
    larger, or if no evaluation is complete, the evaluation is assumed to be halfway (Gott, "Implications of the
    Copernican principle for our future prospects", 1993).
    """
    longest = max((max(e.curve, default=0) for e in evaluations if e.state == "complete"), default=0)
    return longest - losses if longest >= losses else losses


def find_expandable(
    halving: HalvingSchedule, evaluations: Sequence[Evaluation], now: float
) -> list[ExpandableEvaluation]:
    """Return the running evaluations that have passed a rung and would save enough time with more workers.

    A rung is a step at which losses are compared. An evaluation that has passed n rungs may have up to 2**n workers.
    More workers join at the next loss. At least three losses must follow it before the next rung or the end.
    `now` is the current time in seconds since the epoch.
    """
    found = []
    for root, group in group_by_individual(evaluations).items():
        latest = group[-1]
        losses = max(latest.curve, default=0)
        if latest.state != "running" or latest.tests is not None or losses <= latest.resumed_from_step:
            continue
        passed, rung = halving.locate_in_rungs(root, losses)
        if 2 * len(latest.workers) > 2**passed:
            continue
        left = min(rung - losses, estimate_losses_left(evaluations, losses)) - 1
        if left > 2:
            wait = max(0.0, now - latest.started) / (losses - latest.resumed_from_step)
            found.append(ExpandableEvaluation(latest.trial, latest.worker, wait))
    return found
