"""Choose the scale of losses in figures, without extreme losses that would flatten all others."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_MAX_LINEAR_RATIO = 20.0  # highest loss divided by the lowest; above this, the scale is logarithmic
_MAX_LOSS_RATIO = 100  # multiple of the usual loss at which outliers begin
_PARTS = 10  # Nine tenths of the losses get at least this fraction, 1 / _PARTS, of the scale.
_MAX_SHORTENED_FRACTION = 0.5  # Losses are excluded only if the scale shrinks to this fraction or less.
_POWER_RANGE = -323, 308  # exponents of ten in the range of floats


@dataclass(frozen=True)
class LossScale:
    """A scale from the lowest loss to the highest loss that it includes."""

    lowest: float
    highest: float

    @property
    def is_logarithmic(self) -> bool:
        """Whether the scale is logarithmic, because the losses are positive and far apart."""
        return self.lowest > 0 and self.highest / self.lowest > _MAX_LINEAR_RATIO

    def is_out_of_range(self, loss: float) -> bool:
        """Return whether a loss is above the upper end of the scale."""
        return loss > self.highest

    def compute_fraction(self, loss: float) -> float:
        """Return the position of a loss: 0 for the lowest, 1 for the highest."""
        if self.is_logarithmic:
            lowest, highest = math.log10(self.lowest), math.log10(self.highest)
            return (math.log10(loss) - lowest) / (highest - lowest)
        length = self.highest / 2 - self.lowest / 2  # Halves are used because a difference of floats may overflow.
        return (loss / 2 - self.lowest / 2) / length if length else 0.0

    def compute_loss(self, fraction: float) -> float:
        """Return the loss at a position, limited to finite floats.

        If the scale holds a single loss, its length is the absolute value of the loss, or 1 for a loss of 0.
        """
        if self.is_logarithmic:
            lowest, highest = math.log10(self.lowest), math.log10(self.highest)
            power = lowest + fraction * (highest - lowest)
            return float(10 ** max(_POWER_RANGE[0], min(power, _POWER_RANGE[1])))
        length = self.highest / 2 - self.lowest / 2 or abs(self.highest) / 2 or 0.5
        loss = 2 * (self.lowest / 2 + fraction * length)
        return max(-sys.float_info.max, min(loss, sys.float_info.max))


def make_loss_scale(drawn_losses: Sequence[float], losses: Sequence[float] = ()) -> LossScale:
    """Return the scale for the losses of a figure.

    The lower end is the lowest loss. The upper end excludes outliers by two rules:

    1. Losses more than 100 times as high as the usual loss. The usual loss is the median of the losses above the best,
       since up to half of all individuals may diverge. If losses are not positive: losses that exceed the usual loss
       by more than 99 times its absolute value and 99 times its distance from the best.
    2. If nine tenths of the other losses fill less than a tenth of the scale: losses more than ten times as far from
       the lower end as these nine tenths. This excludes at most a tenth of the losses, and none of ten or fewer.

    A rule applies only if it halves the scale at least, so the scale includes all losses of a run without outliers.

    Args:
        drawn_losses: Losses in the figure.
        losses: Losses of all complete evaluations, which determine the usual loss; default: `drawn_losses`.
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
    """Return the finite losses of complete evaluations, which show the usual losses of a run."""
    return [
        evaluation.loss
        for evaluation in evaluations
        if evaluation.state == "complete" and math.isfinite(evaluation.loss)
    ]


def _shorten_scale(scale: LossScale, losses: Sequence[float], limit: float) -> LossScale:
    """Return a scale that ends at the highest loss up to `limit`, or `scale` itself if that would save little."""
    inside = [loss for loss in losses if loss <= limit]
    worth_it = bool(inside) and scale.compute_fraction(inside[-1]) <= _MAX_SHORTENED_FRACTION
    return LossScale(scale.lowest, inside[-1]) if worth_it else scale


def _compute_upper_limit(losses: Sequence[float]) -> float:
    best, usual = min(losses), _compute_quantile(losses, 0.5)
    return usual + (_MAX_LOSS_RATIO - 1) * max(abs(usual), usual - best)


def _compute_quantile(losses: Sequence[float], fraction: float) -> float:
    """Return the lowest loss that a `fraction` of the losses above the best does not exceed."""
    best = min(losses)
    above = sorted(loss for loss in losses if loss > best) or [best]
    return above[math.ceil(fraction * len(above)) - 1]
