"""Estimate by how much further evaluations of a search lower the lowest loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation, sort_by_end

NEXT_SHARE = 0.1
"""The number of further evaluations whose gain is estimated, as a share of the budget."""
_MIN_COMPLETE = 20
_NEGLIGIBLE = 1e-3  # A lower probability that no loss is left after the choice is ignored.


@dataclass(frozen=True)
class NextGain:
    """What further evaluations are expected to gain, and how long they take."""

    evaluations: int
    """The number of further evaluations."""
    gain: float
    """The expected reduction of the lowest loss, as a share of its absolute value. Infinite if it cannot be a share."""
    seconds: float
    """Their time on one worker. NaN if it is unknown."""


def estimate_next_gain(evaluations: Sequence[Evaluation], budget: int) -> NextGain | None:
    """Estimate what the next tenth of the budget gains.

    The estimate assumes that the next evaluations are as good as earlier ones were. It is the mean gain of a random
    choice of earlier evaluations over all others. It is the mean of two estimates. One chooses from the latest half,
    because later evaluations of a search are better. But if the best is in the first half by chance, this half gains
    nothing. So the other chooses from all evaluations (benchmarks/search-quality.md).

    Args:
        evaluations: The evaluations of the run, with one objective.
        budget: The number of evaluations of the whole run.

    Returns:
        The estimate; None if fewer than 20 evaluations are complete, or if any evaluation started from a parent's
        checkpoint, because its loss follows from the parent's.
    """
    ended = sort_by_end(evaluations)
    losses = [evaluation.loss if evaluation.state == "complete" else math.inf for evaluation in ended]
    imported = [one.loss for one in evaluations if one.imported_from and one.state == "complete"]
    count, latest = max(1, round(NEXT_SHARE * budget)), ended[len(ended) // 2 :]
    if sum(map(math.isfinite, losses)) < _MIN_COMPLETE or any(one.inherits is not None for one in ended):
        return None
    gain = statistics.fmean(_estimate_gain([*imported, *losses], number, count) for number in (len(latest), len(ended)))
    return NextGain(count, gain, count * sum(evaluation.seconds for evaluation in latest) / len(latest))


def is_gain_below(share: float, evaluations: Sequence[Evaluation], budget: int) -> bool:
    """Return whether the next tenth of the budget is expected to reduce the lowest loss by less than a share."""
    expected = estimate_next_gain(evaluations, budget) if share > 0 else None
    return expected is not None and expected.gain < share


def _estimate_gain(losses: Sequence[float], latest: int, count: int) -> float:
    """Return the share by which `count` random losses of the latest reduce the lowest of all other losses.

    At most half of the latest losses are chosen. For a larger `count`, the reduction is assumed to be repeated. That is
    too much rather than too little.

    Args:
        losses: The losses, the latest last.
        latest: The number of latest losses, of which some are chosen.
        count: The number of chosen losses.
    """
    chosen = min(count, latest // 2)
    best_first = sorted(range(len(losses)), key=losses.__getitem__)
    lowest, gain, chance = losses[best_first[0]], 0.0, 1.0
    # `chance` is the probability that all better losses have been chosen.
    for taken, index in enumerate(best_first):
        is_latest = index >= len(losses) - latest
        is_chosen = (chosen - taken) / (latest - taken) if is_latest and taken < chosen else 0.0
        if not math.isfinite(losses[index]):
            if chance > _NEGLIGIBLE:
                return math.inf  # Without the chosen losses, there may be none.
            break
        gain += chance * (1 - is_chosen) * (losses[index] - lowest)
        chance *= is_chosen
        if not chance:
            break
    scale = max(abs(lowest), abs(lowest + gain))
    share = gain / scale if scale else 0.0
    return 1 - (1 - share) ** (count / chosen) if share < 1 else math.inf
