"""The scale of losses in figures: it leaves out far higher losses, so that diverged ones do not flatten the others."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MAX_LINEAR_RATIO = 20.0  # the highest over the lowest: where losses are further apart, their scale is logarithmic
_MAX_LOSS_RATIO = 100  # times the usual loss
_PARTS = 10  # of a scale; nine tenths of the losses get one of them at least
_MAX_SHORTENED_FRACTION = 0.5  # of a scale, if losses are left out: less is not worth it
_POWER_RANGE = -323, 308  # of ten: what floats can be


@dataclass(frozen=True)
class LossScale:
    """From the lowest loss to the highest that is not beyond the scale."""

    lowest: float
    highest: float

    @property
    def is_logarithmic(self) -> bool:
        """Whether losses are too far apart for a linear scale, and can be on a logarithmic one."""
        return self.lowest > 0 and self.highest / self.lowest > _MAX_LINEAR_RATIO

    def is_out_of_range(self, loss: float) -> bool:
        """Tell whether a loss is beyond the upper end."""
        return loss > self.highest

    def compute_fraction(self, loss: float) -> float:
        """Return the place of a loss: 0 for the lowest, 1 for the highest."""
        if self.is_logarithmic:
            lowest, highest = math.log10(self.lowest), math.log10(self.highest)
            return (math.log10(loss) - lowest) / (highest - lowest)
        length = self.highest / 2 - self.lowest / 2  # halves: the difference of two floats may overflow
        return (loss / 2 - self.lowest / 2) / length if length else 0.0

    def compute_loss(self, fraction: float) -> float:
        """Return the loss at a place, within the range of floats; a scale of one loss is as long as that is high."""
        if self.is_logarithmic:
            lowest, highest = math.log10(self.lowest), math.log10(self.highest)
            power = lowest + fraction * (highest - lowest)
            return float(10 ** max(_POWER_RANGE[0], min(power, _POWER_RANGE[1])))
        length = self.highest / 2 - self.lowest / 2 or abs(self.highest) / 2 or 0.5
        loss = 2 * (self.lowest / 2 + fraction * length)
        return max(-sys.float_info.max, min(loss, sys.float_info.max))


def make_loss_scale(drawn_losses: Sequence[float], losses: Sequence[float] = ()) -> LossScale:
    """Return the scale for the losses that are `drawn`, in a run whose complete evaluations have these `losses`.

    The lower the better, so the lower end is the lowest loss of all, and only the upper end may leave some out:

    1. What is more than 100 times as high as the usual loss, which is the median of those above the best: up to half
       of all individuals may have diverged. Where losses are not positive: what is further above the usual one than 99
       times its size, and than 99 times its distance from the best.
    2. Of the others, if nine tenths have less than a tenth of the scale for themselves, what is more than ten times as
       far up as these nine tenths are: a tenth of the others at most, and nothing of ten or fewer.

    Each rule applies only where it halves the scale at least. Otherwise, and so in every run without outliers, all
    losses are on the scale.
    """
    shown = sorted(loss for loss in drawn_losses if math.isfinite(loss))
    if not shown:
        return LossScale(0.0, 0.0)
    scale = _shorten_scale(
        LossScale(shown[0], shown[-1]), shown, _compute_upper_limit(losses if len(set(losses)) > 1 else shown)
    )
    inside = [loss for loss in shown if not scale.is_out_of_range(loss)]
    nine_tenths = _compute_quantile(inside, 0.9)
    return _shorten_scale(
        scale, inside, max(nine_tenths, scale.compute_loss(_PARTS * scale.compute_fraction(nine_tenths)))
    )


def find_complete_losses(evaluations: Sequence[Evaluation]) -> list[float]:
    """Return the losses of what is complete, which say what is usual in a run."""
    return [
        evaluation.loss
        for evaluation in evaluations
        if evaluation.state == "complete" and math.isfinite(evaluation.loss)
    ]


def _shorten_scale(scale: LossScale, losses: Sequence[float], limit: float) -> LossScale:
    """Return a scale that ends at the highest loss up to the limit, if that is worth it; `losses` are sorted."""
    inside = [loss for loss in losses if loss <= limit]
    worth_it = bool(inside) and scale.compute_fraction(inside[-1]) <= _MAX_SHORTENED_FRACTION
    return LossScale(scale.lowest, inside[-1]) if worth_it else scale


def _compute_upper_limit(losses: Sequence[float]) -> float:
    best, usual = min(losses), _compute_quantile(losses, 0.5)
    return usual + (_MAX_LOSS_RATIO - 1) * max(abs(usual), usual - best)


def _compute_quantile(losses: Sequence[float], fraction: float) -> float:
    """Return the lowest loss that a `share` of those above the best do not exceed; equals of the best do not count."""
    best = min(losses)
    above = sorted(loss for loss in losses if loss > best) or [best]
    return above[math.ceil(fraction * len(above)) - 1]
