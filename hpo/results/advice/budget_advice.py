"""Advise to train for more epochs, or to stop a search that has had enough evaluations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpo.results.advice.run_result import Advice, RunResult, compute_relative_gap, format_percent
from hpo.results.next_gain import summarize_next_gain
from hpo.store.evaluations import sort_by_end

_CURVE_COUNT = 5  # Number of best evaluations whose loss curves are used.
_MIN_EPOCHS = 4
_MIN_EPOCH_GAIN = 0.02  # Share of the loss that twice as many epochs must gain.
_MIN_COMPLETE = 30
_SMALL_GAIN = 0.01  # Share of the loss that twice as many evaluations gain at most.
_MAX_LOSSES = 30  # Higher losses contain no information about the lowest.


def advise_more_epochs(result: RunResult) -> Advice | None:
    """Advise to train for more epochs, if the five best losses still fall and twice as many epochs would lower them.

    False alarms are rare. After 4 epochs or more, a curve that has stopped falling may be lowest at its final epoch by
    chance. The probability is at most 1/4. For all five curves, it is at most 4^-5 = 1/1,024.
    """
    if result.has_inheritance:
        return None  # The training of parents continues in their offspring.
    own = [evaluation for evaluation in result.rank_complete() if not evaluation.imported_from][:_CURVE_COUNT]
    curves = [[evaluation.curve[epoch] for epoch in sorted(evaluation.curve)] for evaluation in own]
    if len(curves) < _CURVE_COUNT or not all(map(_is_falling, curves)):
        return None
    if statistics.median(map(_estimate_epoch_gain, curves)) < _MIN_EPOCH_GAIN:
        return None
    falls = [compute_relative_gap(curve[-1 - len(curve) // 4], curve[-1]) for curve in curves]
    epochs = result.manifest.settings.get("epochs")
    twice = 2 * epochs if type(epochs) is int and epochs > 0 and "epochs" not in result.distributions else 0
    return Advice(
        "epochs",
        "Train for more epochs, in a new run, because losses after more epochs cannot be compared with these.",
        f"The loss of each of the best {_CURVE_COUNT} is lowest after its last epoch; the last quarter of the "
        f"epochs lowered it by {' to '.join(dict.fromkeys(map(format_percent, (min(falls), max(falls)))))}.",
        result.format_new_command(epochs=twice) if twice else "",
    )


def _is_falling(curve: Sequence[float]) -> bool:
    return len(curve) >= _MIN_EPOCHS and all(map(math.isfinite, curve)) and curve[-1] < min(curve[:-1])


def _estimate_epoch_gain(curve: Sequence[float]) -> float:
    """Estimate the share by which twice as many epochs reduce the loss.

    The gain of each quarter of the epochs is assumed to be a constant fraction of the previous quarter's gain.
    """
    quarter = len(curve) // 4
    scale = max(map(abs, curve))
    before, then, now = (loss / scale for loss in (curve[-1 - 2 * quarter], curve[-1 - quarter], curve[-1]))
    if then >= before or not now:
        return 0.0
    ratio = min(1.0, (then - now) / (before - then))
    return (then - now) * sum(ratio**count for count in range(1, 5)) / abs(now)


def advise_stop(result: RunResult) -> Advice | None:
    """Advise to stop if the second half of the search found nothing better, and twice as many evaluations gain little.

    The first condition alone is weak, because random search finds its best in the first half with a probability of 1/2.
    Therefore the best losses must also be close together. Runs with several objectives get no such advice, because
    other objectives may still improve. Runs in which evaluations start from a parent's checkpoint get no such advice
    either, because the losses of parents and children are always close together.
    """
    if result.manifest.objectives.is_multi_objective or result.has_inheritance:
        return None
    ended = sort_by_end(result.evaluations)
    complete = [evaluation for evaluation in ended if evaluation.state == "complete"]
    best = result.rank_complete()[:_MAX_LOSSES]
    if result.is_running or result.is_exhausted or len(complete) < _MIN_COMPLETE or not best:
        return None
    found = (
        0
        if best[0].imported_from
        else 1 + min(index for index, evaluation in enumerate(ended) if evaluation.loss == best[0].loss)
    )
    gain = _estimate_search_gain([evaluation.loss for evaluation in best])
    if 2 * found > len(ended) or gain > _SMALL_GAIN:
        return None
    after = f"after {found} of {len(ended)} evaluations" if found else "before this run"
    return Advice(
        "flat",
        "Stop here, or change the search space: more evaluations like these will find little.",
        f"The best was found {after}, and nothing better since. The best losses are so close together that as many "
        f"evaluations again may lower the lowest by {format_percent(gain)}.",
    )


def advise_more_evaluations(result: RunResult) -> Advice | None:
    """Advise to continue a search whose budget is spent, if the next tenth of the budget would gain 1% or more."""
    if result.is_running or not result.is_spent or result.is_exhausted or result.is_target_reached:
        return None
    expected = summarize_next_gain(result.evaluations, result.manifest)
    has_own_limit = result.options.get("stop_gain") is not None  # The user has decided.
    if has_own_limit or expected is None or expected["gain"] is None or expected["gain"] < _SMALL_GAIN:
        return None
    return Advice(
        "more",
        "Continue the search.",
        f"{expected['evaluations']} more evaluations should lower the best loss by {format_percent(expected['gain'])}, "
        "if they are as good as earlier ones.",
        result.format_resume_command("--evaluations", str(result.manifest.budget * 3 // 2)),
    )


def _estimate_search_gain(losses: Sequence[float]) -> float:
    """Estimate the share by which twice as many evaluations reduce the lowest loss.

    The estimate is the mean gain from a random half of the evaluations to all evaluations. The best of a random half
    is the best of all with a probability of 1/2, the second best of all with 1/4, and so on. The next doubling gains
    less, so the estimate is an upper bound.
    """
    lowest = losses[0]
    gain = sum((loss - lowest) * 0.5 ** (rank + 1) for rank, loss in enumerate(losses))
    return gain / abs(lowest) if lowest else math.inf if gain else 0.0
