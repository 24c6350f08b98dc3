"""Choose the range of losses in a figure, without extreme losses, which would flatten others."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MAX_LINEAR_RATIO = 20.0  # highest loss divided by the lowest; above this, the scale is logarithmic
_MAX_LOSS_RATIO = 100  # multiple of the usual loss at which outliers begin
_PARTS = 10  # Nine tenths of the losses get at least this fraction, 1 / _PARTS, of the scale.
# Losses are excluded only if the scale shrinks to this fraction or less.
_MAX_SHORTENED_FRACTION = 0.5
_POWER_RANGE = -323, 308  # exponents of ten in the range of floats


@dataclass(frozen=True)
class LossScale:
    """Range of losses on an axis, from `lowest` to `highest`. Higher losses are out of range."""

    lowest: float
    highest: float

    @property
    def is_logarithmic(self) -> bool:
        """Whether `lowest` is positive and `highest` over 20 times as high."""
        return self.lowest > 0 and self.highest / self.lowest > _MAX_LINEAR_RATIO

    def is_out_of_range(self, loss: float) -> bool:
        """Return whether a loss is above the upper end of the scale."""
        return loss > self.highest

    def compute_fraction(self, loss: float) -> float:
        """Return the position of a loss on the scale: 0 for `lowest`, 1 for `highest`."""
        if self.is_logarithmic:
            lowest = math.log10(self.lowest)
            return (math.log10(loss) - lowest) / (math.log10(self.highest) - lowest)
        # Halves are used because a difference of floats may overflow.
        length = self.highest / 2 - self.lowest / 2
        return (loss / 2 - self.lowest / 2) / length if length else 0.0

    def compute_loss(self, fraction: float) -> float:
        """Return the loss at a position on the scale: `lowest` at 0, `highest` at 1.

        The result is always finite. If `lowest` equals `highest`, the scale is as long as the
        absolute value of this loss, or 1 for a loss of 0.
        """
        if self.is_logarithmic:
            lowest = math.log10(self.lowest)
            power = lowest + fraction * (math.log10(self.highest) - lowest)
            return float(10 ** max(_POWER_RANGE[0], min(power, _POWER_RANGE[1])))
        length = self.highest / 2 - self.lowest / 2 or abs(self.highest) / 2 or 0.5
        loss = 2 * (self.lowest / 2 + fraction * length)
        return max(-sys.float_info.max, min(loss, sys.float_info.max))


def make_loss_scale(drawn_losses: Sequence[float], losses: Sequence[float] = ()) -> LossScale:
    """Return the scale for the losses of a figure.

    The scale begins at the lowest loss. It ends at the highest loss that is not an outlier. There
    are two rules:

    1. If all losses are positive, a loss is an outlier above 100 times the usual loss. The usual
       loss is the median of all losses above the best loss, because up to half of all individuals
       may diverge. Otherwise, the limit is the usual loss plus 99 times its absolute value, or 99
       times its distance from the best loss if this is larger.
    2. A loss in the highest tenth of the remaining losses is an outlier if it is too far from the
       lowest loss. The limit is ten times the largest distance in the other nine tenths. With ten
       losses or fewer, this rule finds no outliers.

    A rule applies only if it makes the scale at most half as long. The scale thus includes all
    losses of a run without outliers. `losses` of all complete evaluations determine the usual loss;
    default: `drawn_losses`.
    """
    shown = sorted(loss for loss in drawn_losses if math.isfinite(loss))
    if not shown:
        return LossScale(0.0, 0.0)
    known = losses if len(set(losses)) > 1 else shown
    usual = _compute_quantile(known, 0.5)
    limit = usual + (_MAX_LOSS_RATIO - 1) * max(abs(usual), usual - min(known))
    scale = _shorten_scale(LossScale(shown[0], shown[-1]), shown, limit)
    inside = [loss for loss in shown if not scale.is_out_of_range(loss)]
    nine_tenths = _compute_quantile(inside, 0.9)
    farthest = scale.compute_loss(_PARTS * scale.compute_fraction(nine_tenths))
    return _shorten_scale(scale, inside, max(nine_tenths, farthest))


def find_complete_losses(evaluations: Sequence[Evaluation]) -> list[float]:
    """Return the losses of all complete evaluations, except infinite losses and NaN."""
    return [e.loss for e in evaluations if e.state == "complete" and math.isfinite(e.loss)]


def _shorten_scale(scale: LossScale, losses: Sequence[float], limit: float) -> LossScale:
    """Return a scale that ends at the highest loss up to `limit`, if it is at most half as long."""
    inside = [loss for loss in losses if loss <= limit]
    if inside and scale.compute_fraction(inside[-1]) <= _MAX_SHORTENED_FRACTION:
        return LossScale(scale.lowest, inside[-1])
    return scale


def _compute_quantile(losses: Sequence[float], fraction: float) -> float:
    """Return a quantile of the losses above the best loss: for `fraction` 0.5, their median."""
    best = min(losses)
    above = sorted(loss for loss in losses if loss > best) or [best]
    return above[math.ceil(fraction * len(above)) - 1]
