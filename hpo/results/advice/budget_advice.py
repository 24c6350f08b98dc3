"""Whether a search should have more epochs, and whether it has had enough evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpo.results.advice.run_result import Advice, RunResult, compute_relative_gap, format_percent
from hpo.results.search_history import sort_by_end

_CURVE_COUNT = 5  # evaluations whose curves are looked at
_MIN_EPOCHS = 4  # epochs
_MIN_EPOCH_GAIN = 0.02  # of a loss, for twice as many epochs
_MIN_COMPLETE = 30
_SMALL_GAIN = 0.01  # of a loss, for as many evaluations again
_MAX_LOSSES = 30  # losses: those behind them tell nothing of the lowest any more


def advise_more_epochs(result: RunResult) -> Advice | None:
    """Advise to train for longer where the losses of the best still fall at the end, and as long again would help.

    Five curves that have come to rest are all lowest at their last epoch in one of 4^5 = 1,024 runs, or more rarely.
    """
    if result.has_inheritance:
        return None  # individuals go on in those that inherit from them
    own = [one for one in result.rank_complete() if not one.imported_from][:_CURVE_COUNT]
    curves = [[one.curve[epoch] for epoch in sorted(one.curve)] for one in own]
    if len(curves) < _CURVE_COUNT or not all(map(_is_falling, curves)):
        return None
    if statistics.median(map(_estimate_epoch_gain, curves)) < _MIN_EPOCH_GAIN:
        return None
    falls = [compute_relative_gap(curve[-1 - len(curve) // 4], curve[-1]) for curve in curves]
    epochs = result.manifest.settings.get("epochs")
    twice = 2 * epochs if type(epochs) is int and epochs > 0 and "epochs" not in result.distributions else 0
    return Advice(
        "epochs",
        "Train for more epochs, in a new run, since losses after more epochs do not compare with these.",
        f"The loss of each of the best {_CURVE_COUNT} is lowest after its last epoch; the last quarter of the "
        f"epochs lowered "
        f"it by {' to '.join(dict.fromkeys(map(format_percent, (min(falls), max(falls)))))}.",
        result.format_new_command(epochs=twice) if twice else "",
    )


def _is_falling(curve: Sequence[float]) -> bool:
    return len(curve) >= _MIN_EPOCHS and all(map(math.isfinite, curve)) and curve[-1] < min(curve[:-1])


def _estimate_epoch_gain(curve: Sequence[float]) -> float:
    """Estimate how far as many epochs again lower a loss, as a share of it: each quarter by so much of the last one."""
    quarter = len(curve) // 4
    scale = max(map(abs, curve))
    before, then, now = (loss / scale for loss in (curve[-1 - 2 * quarter], curve[-1 - quarter], curve[-1]))
    if then >= before or not now:
        return 0.0
    ratio = min(1.0, (then - now) / (before - then))
    return (then - now) * sum(ratio**count for count in range(1, 5)) / abs(now)


def advise_stop(result: RunResult) -> Advice | None:
    """Advise to stop where the second half of a search found nothing, and as much again would find little.

    That the best was found in the first half says little: in a random search, it is so in one of two runs. How close
    together the best losses are says more, see `_estimate_search_gain`. Of several objectives, the others may still
    gain. With inheritance, each line continues from losses that are close together.
    """
    if result.manifest.objectives.is_multi_objective or result.has_inheritance:
        return None
    ended = sort_by_end(result.evaluations)
    complete = [one for one in ended if one.state == "complete"]
    best = result.rank_complete()[:_MAX_LOSSES]
    if result.is_running or result.is_exhausted or len(complete) < _MIN_COMPLETE or not best:
        return None
    found = (
        0 if best[0].imported_from else 1 + min(place for place, one in enumerate(ended) if one.loss == best[0].loss)
    )
    gain = _estimate_search_gain([one.loss for one in best])
    if 2 * found > len(ended) or gain > _SMALL_GAIN:
        return None
    after = f"after {found} of {len(ended)} evaluations" if found else "before this run"
    return Advice(
        "flat",
        "Stop here, or change the search space: more evaluations like these will find little.",
        f"The best was found {after}, and nothing better since. The best losses are so close together that as many "
        f"evaluations again may lower the lowest by {format_percent(gain)}.",
    )


def _estimate_search_gain(losses: Sequence[float]) -> float:
    """Estimate how far as many evaluations again lower the lowest loss, as a share of it.

    That is what they gain over a half of them, drawn at random: its best is the best of all in one of two cases, the
    second best in one of four, and so on. What comes next gains less, since there is less and less to gain.
    """
    lowest = losses[0]
    gain = sum((loss - lowest) * 0.5 ** (place + 1) for place, loss in enumerate(losses))
    return gain / abs(lowest) if lowest else math.inf if gain else 0.0
