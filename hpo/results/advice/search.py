"""Whether a search should have more epochs, and whether it has had enough evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpo.results.advice.result import Advice, Result, apart, percent
from hpo.results.history import in_order

_BEST = 5  # evaluations whose curves are looked at
_SHORTEST = 4  # epochs
_WORTH_THE_TIME = 0.02  # of a loss, for twice as many epochs
_LEAST_COMPLETE = 30
_LITTLE = 0.01  # of a loss, for as many evaluations again
_CLOSEST = 30  # losses: those behind them tell nothing of the lowest any more


def too_few_epochs(result: Result) -> Advice | None:
    """Advise to train for longer where the losses of the best still fall at the end, and as long again would help.

    Five curves that have come to rest are all lowest at their last epoch in one of 4^5 = 1,024 runs, or more rarely.
    """
    if result.has_heirs:
        return None  # individuals go on in those that inherit from them
    own = [one for one in result.ranked() if not one.imported_from][:_BEST]
    curves = [[one.curve[epoch] for epoch in sorted(one.curve)] for one in own]
    if len(curves) < _BEST or not all(map(_falls, curves)):
        return None
    if statistics.median(map(_gain_of_epochs, curves)) < _WORTH_THE_TIME:
        return None
    falls = [apart(curve[-1 - len(curve) // 4], curve[-1]) for curve in curves]
    epochs = result.manifest.settings.get("epochs")
    twice = 2 * epochs if type(epochs) is int and epochs > 0 and "epochs" not in result.distributions else 0
    return Advice(
        "epochs",
        "Train for more epochs, in a new run, since losses after more epochs do not compare with these.",
        f"The loss of each of the best {_BEST} is lowest after its last epoch; the last quarter of the epochs lowered "
        f"it by {' to '.join(dict.fromkeys(map(percent, (min(falls), max(falls)))))}.",
        result.starting_anew(epochs=twice) if twice else "",
    )


def _falls(curve: Sequence[float]) -> bool:
    return len(curve) >= _SHORTEST and all(map(math.isfinite, curve)) and curve[-1] < min(curve[:-1])


def _gain_of_epochs(curve: Sequence[float]) -> float:
    """Estimate how far as many epochs again lower a loss, as a share of it: each quarter by so much of the last one."""
    quarter = len(curve) // 4
    scale = max(map(abs, curve))
    before, then, now = (loss / scale for loss in (curve[-1 - 2 * quarter], curve[-1 - quarter], curve[-1]))
    if then >= before or not now:
        return 0.0
    ratio = min(1.0, (then - now) / (before - then))
    return (then - now) * sum(ratio**count for count in range(1, 5)) / abs(now)


def too_many_evaluations(result: Result) -> Advice | None:
    """Advise to stop where the second half of a search found nothing, and as much again would find little.

    That the best was found in the first half says little: in a random search, it is so in one of two runs. How close
    together the best losses are says more, see `_expected_gain`. Of several objectives, the others may still gain. With
    inheritance, each line continues from losses that are close together.
    """
    if result.manifest.objectives.are_several or result.has_heirs:
        return None
    ended = in_order(result.evaluations)
    complete = [one for one in ended if one.state == "complete"]
    best = result.ranked()[:_CLOSEST]
    if result.goes_on or result.is_exhausted or len(complete) < _LEAST_COMPLETE or not best:
        return None
    found = (
        0 if best[0].imported_from else 1 + min(place for place, one in enumerate(ended) if one.loss == best[0].loss)
    )
    gain = _expected_gain([one.loss for one in best])
    if 2 * found > len(ended) or gain > _LITTLE:
        return None
    after = f"after {found} of {len(ended)} evaluations" if found else "before this run"
    return Advice(
        "flat",
        "Stop here, or change the search space: more evaluations like these will find little.",
        f"The best was found {after}, and nothing better since. The best losses are so close together that as many "
        f"evaluations again may lower the lowest by {percent(gain)}.",
    )


def _expected_gain(losses: Sequence[float]) -> float:
    """Estimate how far as many evaluations again lower the lowest loss, as a share of it.

    That is what they gain over a half of them, drawn at random: its best is the best of all in one of two cases, the
    second best in one of four, and so on. What comes next gains less, since there is less and less to gain.
    """
    lowest = losses[0]
    gain = sum((loss - lowest) * 0.5 ** (place + 1) for place, loss in enumerate(losses))
    return gain / abs(lowest) if lowest else math.inf if gain else 0.0
