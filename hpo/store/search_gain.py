"""Estimate by how much further evaluations of a search lower the lowest loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation, sort_by_end

NEXT_SHARE = 0.1
"""The number of further evaluations whose gain is estimated, as a share of the budget."""
_MIN_EVALUATIONS = 20


@dataclass(frozen=True)
class NextGain:
    """What further evaluations are expected to gain, and how long they take."""

    evaluations: int
    """The number of further evaluations."""
    gain: float
    """The expected reduction of the lowest loss, as a share of its absolute value. Infinite if the lowest loss is 0."""
    seconds: float
    """Their time on one worker. NaN if it is unknown."""


def estimate_next_gain(evaluations: Sequence[Evaluation], budget: int) -> NextGain | None:
    """Estimate what the next tenth of the budget gains.

    The estimate assumes that the next evaluations are as good as the latest half were. It is the mean gain of a random
    choice of evaluations from the latest half over all others (benchmarks/search-quality.md).

    Args:
        evaluations: The evaluations of the run, with one objective.
        budget: The number of evaluations of the whole run.

    Returns:
        The estimate; None for fewer than 20 evaluations, if none has succeeded, or if any started from a parent's
        checkpoint, whose losses follow from those of their parents.
    """
    ended = sort_by_end(evaluations)
    losses = [evaluation.loss if evaluation.state == "complete" else math.inf for evaluation in ended]
    lowest = min(losses, default=math.inf)
    if len(ended) < _MIN_EVALUATIONS or not math.isfinite(lowest) or any(e.inherits is not None for e in ended):
        return None
    count, latest = max(1, round(NEXT_SHARE * budget)), ended[len(ended) // 2 :]
    gain = _estimate_gain(losses, count)
    share = gain / abs(lowest) if lowest else math.inf if gain else 0.0
    return NextGain(count, share, count * sum(evaluation.seconds for evaluation in latest) / len(latest))


def is_gain_below(share: float, evaluations: Sequence[Evaluation], budget: int) -> bool:
    """Return whether the next tenth of the budget is expected to reduce the lowest loss by less than a share."""
    expected = estimate_next_gain(evaluations, budget) if share > 0 else None
    return expected is not None and expected.gain < share


def _estimate_gain(losses: Sequence[float], count: int) -> float:
    """Return the mean gain of `count` random losses of the latest half over all other losses.

    If that is more than half of the latest half, the gain is estimated for fewer losses, and extrapolated linearly,
    which is too much rather than too little.
    """
    half = len(losses) // 2
    latest = len(losses) - half
    chosen = min(count, latest // 2)
    best_first = sorted(range(len(losses)), key=losses.__getitem__)
    lowest, gain, chance = losses[best_first[0]], 0.0, 1.0
    # `chance` is the probability that all better losses have been chosen.
    for taken, index in enumerate(best_first):
        if not math.isfinite(losses[index]):
            break
        is_chosen = (chosen - taken) / (latest - taken) if index >= half and taken < chosen else 0.0
        rest = chance * (1 - is_chosen)
        gain += rest * (losses[index] - lowest)
        chance *= is_chosen
    return gain * count / chosen
