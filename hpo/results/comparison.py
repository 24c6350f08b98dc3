"""Comparison of several mean losses with the lowest one, by simultaneous confidence bounds.

The method is Hsu's (Constrained simultaneous confidence intervals for multiple comparisons with the best, Annals of
Statistics 12, 1984). If no estimate of the best mean exceeds another by more than its one-sided bound, all statements
below hold together. Bonferroni's inequality gives the bound for each pair, since variances may differ. The variance of
a sample is its own or the pooled one, the larger of the two: few losses have a small variance by chance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95  # of all statements on a set of samples together
ROUNDING = 1e-12  # relative to the largest loss: equal losses may have been summed in another order


@dataclass(frozen=True)
class LossSample:
    """A sample of losses: their mean, their variance, and their number."""

    mean: float
    variance: float
    size: int

    @classmethod
    def from_losses(cls, losses: Sequence[float]) -> LossSample:
        """Return the sample of two losses or more."""
        return cls(statistics.fmean(losses), statistics.variance(losses), len(losses))


@dataclass(frozen=True)
class MeanBound:
    """A bound of a mean: whether it may be the lowest, and by how much it exceeds the lowest at most."""

    may_be_lowest: bool
    excess: float


def pool_variances(samples: Sequence[LossSample]) -> float:
    """Return the variance of the losses around the means of their samples."""
    freedom = sum(sample.size - 1 for sample in samples)
    return sum((sample.size - 1) * sample.variance for sample in samples) / freedom


def compare_with_lowest(samples: Sequence[LossSample]) -> list[MeanBound]:
    """Return a bound for each of two samples or more; all of them hold together with a probability of 95%."""
    from scipy.special import stdtrit  # 0.05 s, and readers of runs without confirmations do not need it

    pooled = pool_variances(samples)
    freedom = sum(sample.size - 1 for sample in samples)
    quantile = float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / (len(samples) - 1)))

    def width(one: LossSample, other: LossSample) -> float:
        parts = (max(sample.variance, pooled) / sample.size for sample in (one, other))
        return quantile * math.sqrt(sum(parts))

    lowest = [one for one in samples if all(one.mean - other.mean <= width(one, other) + ROUNDING for other in samples)]
    return [
        MeanBound(
            any(sample is one for one in lowest),
            max((sample.mean - one.mean + width(sample, one) for one in lowest if one is not sample), default=0.0),
        )
        for sample in samples
    ]
