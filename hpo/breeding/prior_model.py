"""Weigh candidates by the priors of hyperparameters, as long as evaluations agree with them.

The method follows Hvarfner et al., piBO: augmenting acquisition functions with user beliefs for
Bayesian optimization (2022, equation 6). The merit of a candidate is multiplied by a power of its
prior density. The exponent decreases with the number of evaluations. Unlike there, each prior has
its own exponent, which vanishes if evaluations contradict it. All exponents vanish if the
individual that the priors expect to be good is among the worst. Failures are the worst.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from hpo.breeding.encoding import Mask, Vector
from hpo.breeding.gaussian_process import rank_values
from hpo.space import Categorical
from hpo.space.parameters import ODDS, compute_deviation

if TYPE_CHECKING:
    from hpo.space import SearchSpace

# The exponent of a density is 1 until this number of evaluations has ended. Later, it falls with
# the square of their number (benchmarks/priors.md).
_FULL_UNTIL = 10
_MIN_COMPARED = 5
# An individual with at least this negative log density counts as the individual of the priors.
_NEARBY = 0.5


class PriorModel:
    """The priors of a search space, and how far evaluations agree with them.

    Attributes:
        names: The names of the parameters that have a prior, at least one.
        trust: From 0 to 1, how far evaluations agree with all priors together. It is 1 until
            evaluations contradict.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.names = list(space.priors)
        self._indices = [index for index, name in enumerate(space.parameters) if name in self.names]
        parameters = [space.parameters[name] for name in self.names]
        self._expected = np.array([each.encode(each.prior) for each in parameters], float)
        self._deviations = np.array([compute_deviation(each) for each in parameters])
        self._log_odds = np.log([ODDS[each.confidence] for each in parameters])
        self._unordered = np.array([isinstance(each, Categorical) for each in parameters])
        self._rounded = np.array([not each.is_continuous for each in parameters])
        self._low, self._high = np.array([each.limits for each in parameters], float).T
        # Half a step, so that the first and the last whole number are as likely as others.
        half = self._rounded / 2
        # The shares of each normal distribution below the limits of the range.
        self._low_shares = ndtr((self._low - half - self._expected) / self._deviations)
        self._high_shares = ndtr((self._high + half - self._expected) / self._deviations)
        self._exponents: Vector = np.ones(len(parameters))
        self.trust = 1.0

    def compute_log_densities(self, genes: Vector, active: Mask) -> Vector:
        """Return log prior densities, relative to their maxima, shape `(individuals, priors)`.

        It is 0 for an inactive gene.
        """
        distances = genes[:, self._indices] - self._expected
        logs = np.where(
            self._unordered,
            -self._log_odds * (distances != 0),
            -((distances / self._deviations) ** 2) / 2,
        )
        return np.where(active[:, self._indices], logs, 0.0)

    def draw_genes(self, genes: Vector, rng: np.random.Generator) -> Vector:
        """Return a copy of genes, in which priors draw their genes.

        All individuals are drawn at once: `SearchSpace.draw_from_priors` would take 4 ms for each
        suggestion.
        """
        uniform = rng.random((len(genes), len(self._indices)))
        numbers = ndtri(self._low_shares + uniform * (self._high_shares - self._low_shares))
        numbers = self._expected + self._deviations * numbers
        numbers = np.clip(np.where(self._rounded, np.rint(numbers), numbers), self._low, self._high)
        # Of high + odds equal parts of the interval from 0 to 1, the first `high` parts are one
        # other choice each.
        parts = np.floor(uniform * (self._high + np.exp(self._log_odds)))
        choices = (self._expected + 1 + parts) % (self._high + 1)
        drawn: Vector = genes.copy()
        drawn[:, self._indices] = np.where(
            self._unordered, np.where(parts < self._high, choices, self._expected), numbers
        )
        return drawn

    def fit(self, genes: Vector, active: Mask, costs: Vector) -> None:
        """Learn from evaluations how far each prior, and all of them together, can be trusted.

        The costs, shape `(evaluations, objectives)`, are infinite if an evaluation failed.
        """
        densities = self.compute_log_densities(genes, active)
        own = active[:, self._indices]
        ranks = _add_ranks(costs)
        # Priors of inactive parameters do not expect anything.
        together = np.where(own.any(axis=1), densities.sum(axis=1), -np.inf)
        self.trust = _judge_expected(together, ranks)
        _, deviations = _compare_ranks(densities, own, ranks)
        # Twice the probability of a correlation at most as high, if the prior is useless: 1 while
        # evaluations agree.
        trusts = self.trust * np.minimum(1.0, 2 * ndtr(deviations))
        self._exponents = trusts * min(1.0, _FULL_UNTIL / max(len(costs), 1)) ** 2

    def compare(self, genes: Vector, active: Mask, costs: Vector) -> tuple[Vector, Vector]:
        """Return how far evaluations agree with each prior. The arguments are those of `fit`.

        The first result is Spearman's correlations of the ranks of the prior density and of
        success, shape `(priors,)`. They are positive if costs are lower where the prior is denser.
        The second result is the correlations divided by their standard deviation for a useless
        prior. For fewer than 5 evaluations in which the parameter is active, or without
        differences, they are NaN and 0.
        """
        densities = self.compute_log_densities(genes, active)
        return _compare_ranks(densities, active[:, self._indices], _add_ranks(costs))

    def compute_log_weight(self, genes: Vector, active: Mask) -> Vector:
        """Return the logarithm of the factor of each merit, at most 0, shape `(candidates,)`."""
        weight: Vector = self.compute_log_densities(genes, active) @ self._exponents
        return weight


def _compare_ranks(log_densities: Vector, active: Mask, ranks: Vector) -> tuple[Vector, Vector]:
    """Return what `PriorModel.compare` does, from arrays of shape `(evaluations, priors)`."""
    correlations = np.full(log_densities.shape[1], np.nan)
    deviations = np.zeros(log_densities.shape[1])
    for prior, (densities, own) in enumerate(zip(log_densities.T, active.T, strict=True)):
        if own.sum() >= _MIN_COMPARED:
            within = ranks if own.all() else rank_values(ranks[own])
            # The mean rank is half of the number.
            within = within - len(within) / 2
            denser = rank_values(densities[own]) - len(within) / 2
            scale = math.sqrt((denser @ denser) * (within @ within))
            if scale > 0:
                correlations[prior] = -float(denser @ within / scale)
                deviations[prior] = correlations[prior] * math.sqrt(own.sum() - 1)
    return correlations, deviations


def _judge_expected(log_densities: Vector, ranks: Vector) -> float:
    """Return how far all priors can be trusted: twice the share of evaluations that are worse.

    Worse than the evaluation that the priors expect to be good, which is usually the first one of
    the run. It shows a wrong prior much earlier than correlations do. If several evaluations are
    equally close to the priors, the share is their mean: one of them alone may be bad because of
    parameters without a prior.
    """
    if len(log_densities) < _MIN_COMPARED or log_densities.max() < -_NEARBY:
        return 1.0
    expected = log_densities == log_densities.max()
    if expected.all():
        return 1.0
    own = ranks[expected, None]
    others = ranks[~expected]
    worse = np.mean(others > own) + np.mean(others == own) / 2
    return float(min(1.0, 2 * worse))


def _add_ranks(costs: Vector) -> Vector:
    """Return the ranks of the sums of ranks over all objectives, shape `(evaluations,)`."""
    return rank_values(np.sum([rank_values(column) for column in costs.T], axis=0))
