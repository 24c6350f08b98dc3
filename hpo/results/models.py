"""Learn from the evaluations of a run: importances, expected losses, agreement with priors.

**Importances.** A search mostly evaluates individuals with low losses. In them, unimportant
hyperparameters are inherited together with important ones. Therefore the importances are computed
from a model of the whole space, and not directly from the evaluations. The model is a functional
ANOVA: the loss is the sum of a constant, an effect of each parameter, and an effect of each pair of
parameters. Each effect has the mean 0 along each of its parameters (Sobol 1993). The effects are
Gaussian processes (Lu et al. 2022, Additive Gaussian processes revisited). The variance of an
effect is 0 with some probability (spike and slab, George and McCulloch 1993). So each draw from the
posterior shows which parameters matter, and how much. The coupling is the variance of the effect of
a pair, relative to the product of the variances of both parameters.

**Expected losses.** The lowest of many noisy losses is too optimistic. The model is the Gaussian
process of the surrogate on power-transformed losses, but with a prior that expects noise. Its
accuracy on the hpobench tables is in benchmarks/search-quality.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg.lapack import dpotrf
from threadpoolctl import threadpool_limits

from hpo.breeding.encoding import GeneEncoding, Mask, Vector
from hpo.breeding.evaluation_history import find_informative
from hpo.breeding.gaussian_process import (
    GaussianProcess,
    apply_power_transform,
    select_learned,
)
from hpo.breeding.prior_model import PriorModel
from hpo.objectives import Objectives
from hpo.space import Categorical, Parameter, SearchSpace, Value
from hpo.space.parameters import parse_parameter
from hpo.store.evaluations import Evaluation

_MIN_COMPLETE = 20  # evaluations that a model needs
_MAX_EVALUATIONS = 128  # The time of the model grows with the cube of the number of evaluations.
# Chains of the sampler; discarded sweeps and draws of each chain.
_CHAINS = 3
_BURN_IN = 12
_DRAWS = 16
_INTERVAL = (0.05, 0.95)
_OFFSETS = (0.1, 0.3, 1.0, 3.0, 10.0)  # Added before the logarithm is taken, see `_transform`.
# Prior log odds of untransformed losses. The sampler rarely leaves a transformation once the
# effects fit it.
_IDENTITY_LOG_ODDS = 20.0
# Limit of the distance from the lowest loss, in units of the median distance.
_MAX_DISTANCE = 1e100
# Points of the space, to estimate how often conditional parameters are active.
_SPACE_SAMPLES = 500

_WAVES = 6  # Number of cosines in the effect of a number.
_DECAY = 3.0  # The variances of the weights of the cosines are proportional to 1, 2^-3, 3^-3, ...
# Variance of the constant. The mean of a sample differs from the mean of the space.
_CONSTANT = 10.0
# The grid of each variance, in units of the variance of the sample. All values except 0 are equally
# likely.
_VARIANCES = np.array([0.0, 0.05, 0.25, 1.25, 6.25])
_COUPLINGS = np.array([0.0, 0.05, 0.25, 1.0])
_NOISES = np.array([0.0005, 0.002, 0.008, 0.03, 0.1, 0.3, 1.0])
_MOST_VISITED = 40  # Number of parameters with the variance 0 that one sweep draws again.
_LARGE_VALUE = 1e12  # Exceeds the squares of the values in units of the noise.

_NOISE = 0.05  # Prior share of noise in the variance. The fit estimates the real share.
_FITS = 6  # Each fit continues the previous one.

# Standard deviations that a correlation exceeds by chance in one of twenty cases.
_SIGNIFICANT = 1.645

# The hyperparameters and the loss of an evaluation.
_KnownLoss = tuple[tuple[tuple[str, Any], ...], float]


@dataclass(frozen=True)
class Importance:
    """The importance of one hyperparameter."""

    name: str
    share: float
    """The share of the variance of the loss over the space, from 0 to 1. All shares add up to 1."""
    low: float
    """The lower end of the 90% credible interval of the share; 0 if the share may be 0."""
    high: float
    """The upper end of the 90% credible interval of the share."""

    @property
    def is_significant(self) -> bool:
        """Whether the evaluations show that this hyperparameter has an influence."""
        return self.low > 0


def compute_importances(
    evaluations: Sequence[Evaluation], described: Mapping[str, str]
) -> list[Importance]:
    """Estimate the importance of each hyperparameter by a functional ANOVA.

    Constraints of the search space are ignored. The highest importance is first. The result is
    empty if fewer than 20 evaluations are complete or all losses are equal.

    Raises:
        ValueError: If a definition is not valid, or a value is not valid for its parameter.
    """
    complete = select_complete(evaluations)
    if len(complete) < _MIN_COMPLETE or len({evaluation.loss for evaluation in complete}) < 2:
        return []
    known = tuple((tuple(evaluation.params.items()), evaluation.loss) for evaluation in complete)
    return list(_compute_cached(known, tuple(described.items())))


@lru_cache(maxsize=1)  # At the end of a run, the summary and the report need the same importances.
def _compute_cached(
    known: tuple[_KnownLoss, ...], described: tuple[tuple[str, str], ...]
) -> Sequence[Importance]:
    space = read_space(dict(described))
    encoding = GeneEncoding(space)
    genes, active = compute_genes([dict(params) for params, _ in known], encoding)
    chosen = _choose_spread(encoding.encode_points(genes, active))
    losses = np.array([loss for _, loss in known])[chosen]
    shares = _draw_shares(space, genes[chosen], active[chosen], losses)
    means = shares.mean(axis=0)
    means /= means.sum() or 1.0
    low, high = np.quantile(shares, _INTERVAL, axis=0)
    columns = (means.tolist(), low.tolist(), high.tolist())
    found = [Importance(*row) for row in zip(space.parameters, *columns, strict=True)]
    return sorted(found, key=lambda importance: -importance.share)


def _choose_spread(points: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of all points or, if there are too many, of points far from each other."""
    if len(points) <= _MAX_EVALUATIONS:
        return np.arange(len(points))
    chosen = [0]
    distances = np.full(len(points), np.inf)
    while len(chosen) < _MAX_EVALUATIONS:
        distances = np.minimum(distances, np.square(points - points[chosen[-1]]).sum(axis=1))
        chosen.append(int(distances.argmax()))
    return np.sort(chosen)


def _draw_shares(space: SearchSpace, genes: Vector, active: Mask, losses: Vector) -> Vector:
    """Draw each parameter's share of the variance of the loss, shape `(draws, parameters)`."""
    columns = zip(space.parameters.values(), genes.T, active.T, strict=True)
    effects = [_make_effect(*column) for column in columns]
    overlap = _estimate_overlap(space)
    values, log_odds = _transform(losses)
    # The matrices are small, so threads would only wait for each other.
    with threadpool_limits(1, user_api="blas"):
        chains = [
            _AnovaSampler(effects, overlap, values, log_odds, np.random.default_rng(seed))
            for seed in range(_CHAINS)
        ]
        variances = np.concatenate([chain.sample(_BURN_IN, _DRAWS) for chain in chains])
    totals = variances.sum(axis=1, keepdims=True)
    shares: Vector = variances / np.where(totals > 0, totals, 1.0)
    return shares


def _transform(losses: Vector) -> tuple[Vector, Vector]:
    """Return several transformations of the losses, and the log odds of each transformation.

    The first transformation is the identity. The others are log(distance + offset), with the
    offsets in `_OFFSETS`. The distance of a loss from the lowest loss is in units of the median
    distance. The transformed losses have the shape `(transformations, losses)`, and each row has
    the mean 0 and the variance 1. The log odds are the logarithm of the determinant of the
    Jacobian. The identity gets a bonus, so that the model prefers it.
    """
    distances = np.minimum(losses - losses.min(), 1e300)
    distances = np.minimum(distances / (np.median(distances) or distances.mean()), _MAX_DISTANCE)
    logarithms = [np.log(distances + offset) for offset in _OFFSETS]
    values = np.array([distances, *logarithms])
    deviations = values.std(axis=1)
    log_odds = np.array([_IDENTITY_LOG_ODDS, *(-values.sum() for values in logarithms)])
    log_odds -= len(losses) * np.log(deviations)
    return (values - values.mean(axis=1, keepdims=True)) / deviations[:, None], log_odds


def _estimate_overlap(space: SearchSpace) -> Vector:
    """Return for each pair of parameters the share of the space in which they have a common effect.

    Both must be active. The share is 0 if one parameter depends on the other by its condition.
    """
    names = list(space.parameters)
    rng = Random(0)
    drawn = [space.draw(rng) for _ in range(_SPACE_SAMPLES)]
    active = np.array([[name in params for name in names] for params in drawn], float)
    overlap: Vector = active.T @ active / len(active)
    # All parameters on which a parameter depends, directly or not.
    before: dict[str, set[str]] = {}
    for name in names:
        parents = space.conditions[name]
        before[name] = set(parents).union(*(before[parent] for parent in parents))
        for parent in before[name]:
            row = names.index(name)
            column = names.index(parent)
            overlap[row, column] = overlap[column, row] = 0.0
    return overlap


@dataclass(frozen=True)
class _Effect:
    """The effect of one parameter: a weighted sum of functions that are orthonormal over its range.

    The weights are normally distributed. Their variances add up to 1.
    """

    deviations: Vector
    """The standard deviations of the weights, shape `(functions,)`."""
    features: Vector
    """The functions times these deviations, at the points of a sample: `(points, functions)`.

    They are 0 at points where the parameter is inactive.
    """


def _make_effect(parameter: Parameter, genes: Vector, active: Mask) -> _Effect:
    """Return the effect of a parameter at the points of a sample, with cosines as functions.

    Choices that do not occur in the sample are left out. Any two choices have the same distance.
    """
    low, high = parameter.limits
    scales: Vector  # The variances of the weights, before they are made to add up to 1.
    if isinstance(parameter, Categorical):
        seen = np.unique(genes[active])
        positions = (np.searchsorted(seen, genes) + 0.5) / len(seen)
        orders = np.arange(1.0, len(seen))
        scales = np.ones(len(orders))
    elif parameter.is_continuous:
        positions = (genes - low) / (high - low)
        orders = np.arange(1.0, 1 + _WAVES)
        scales = orders**-_DECAY
    else:
        positions = (genes - low + 0.5) / (high - low + 1)
        orders = np.arange(1.0, 1 + min(_WAVES, high - low))
        scales = orders**-_DECAY
    deviations = np.sqrt(scales / max(np.sum(scales), 1e-300))
    functions = math.sqrt(2) * np.cos(np.pi * np.multiply.outer(positions, orders))
    return _Effect(deviations, functions * active[:, None] * deviations)


class _AnovaSampler:
    """Draw functions from the posterior by Gibbs sampling, and compute the variances of effects.

    Args:
        overlap: The share of the search space in which two parameters have a common effect. On the
            diagonal, the share in which a parameter is active. Shape `(parameters, parameters)`.
        values: The values of the function at the points in one or more transformations, shape
            `(transformations, points)`. Each transformation has the mean 0 and the variance 1.
        log_odds: The logarithm of the prior probability of each transformation.
    """

    def __init__(
        self,
        effects: Sequence[_Effect],
        overlap: Vector,
        values: Vector,
        log_odds: Vector,
        rng: np.random.Generator,
    ) -> None:
        self._effects = effects
        self._kernels = np.array([effect.features @ effect.features.T for effect in effects])
        self._overlap = overlap
        self._all_values = values
        self._log_odds = log_odds
        self._rng = rng
        self._count = len(effects)
        self._points = values.shape[1]
        self._values = values[0]
        is_drawn = rng.random(self._count) < 3 / self._count
        self._variances: Vector = np.where(is_drawn, _VARIANCES[2], 0.0)
        self._coupling = float(_COUPLINGS[1])
        self._noise = float(_NOISES[4])

    def sample(self, burn_in: int, draws: int) -> Vector:
        """Return the variance that each parameter causes in each draw, shape `(draws, parameters)`.

        The first `burn_in` sweeps are discarded. A sweep draws the variances once.
        """
        found = []
        for sweep in range(burn_in + draws):
            self._sweep()
            # Early effects are wrong. They would select a wrong transformation, which the sampler
            # then never leaves.
            if sweep >= burn_in - 4:
                self._draw_transformation()
            if sweep >= burn_in:
                found.append(self._draw_shapley_effects())
        return np.array(found)

    def _sweep(self) -> None:
        """Draw the variances, the coupling and the noise in turn.

        This is a griddy Gibbs sampler (Ritter and Tanner 1992).
        """
        self._single, self._double = self._compute_covariances()
        self._score = self._compute_score(self._single + self._coupling * self._double, self._noise)
        idle = self._rng.permutation(np.flatnonzero(self._variances == 0))[:_MOST_VISITED]
        for index in self._rng.permutation(np.append(np.flatnonzero(self._variances), idle)):
            self._draw_effect(int(index))
        single = self._single
        double = self._double
        scores = [self._compute_score(single + c * double, self._noise) for c in _COUPLINGS]
        self._coupling = float(_COUPLINGS[self._draw_index(scores)])
        covariance = single + self._coupling * double
        scores = [self._compute_score(covariance, noise) for noise in _NOISES]
        self._noise = float(_NOISES[self._draw_index(scores)])

    def _draw_effect(self, index: int) -> None:
        before = self._variances[index]
        kernel = self._kernels[index]
        others = np.flatnonzero((self._variances > 0) & (self._overlap[index] > 0))
        others = others[others != index]
        partners = kernel * np.tensordot(self._variances[others], self._kernels[others], 1)
        own = kernel + self._coupling * partners
        rest = self._single + self._coupling * self._double - before * own
        scores = [
            self._score
            if variance == before
            else self._compute_score(rest + variance * own, self._noise)
            for variance in _VARIANCES
        ]
        # The share of the parameters that matter is unknown. Given the other parameters, it has a
        # beta distribution.
        matter = (1 + np.count_nonzero(self._variances) - (before > 0)) / (1 + self._count)
        priors = np.append(1 - matter, np.full(len(_VARIANCES) - 1, matter / (len(_VARIANCES) - 1)))
        chosen = self._draw_index(scores + np.log(priors))
        self._score = scores[chosen]
        self._variances[index] = _VARIANCES[chosen]
        if change := _VARIANCES[chosen] - before:
            self._single += change * kernel
            self._double += change * partners

    def _draw_transformation(self) -> None:
        weights = np.linalg.solve(self._compute_noisy_covariance(), self._all_values.T)
        scores = self._log_odds - 0.5 * np.einsum("ij,ji->i", self._all_values, weights)
        self._values = self._all_values[self._draw_index(scores)]

    def _compute_covariances(self) -> tuple[Vector, Vector]:
        """Return the covariances of the effects of parameters, and of pairs with the coupling 1."""
        single = _CONSTANT + np.tensordot(self._variances, self._kernels, 1)
        double = np.zeros_like(single)
        for first, second in self._find_pairs():
            scale = self._variances[first] * self._variances[second]
            double += scale * self._kernels[first] * self._kernels[second]
        return single, double

    def _compute_noisy_covariance(self) -> Vector:
        single, double = self._compute_covariances()
        return single + self._coupling * double + self._noise * np.eye(self._points)

    def _find_pairs(self) -> list[tuple[int, int]]:
        matter = self._variances > 0
        first, second = np.nonzero(np.triu(np.outer(matter, matter) & (self._overlap > 0), k=1))
        return list(zip(first.tolist(), second.tolist(), strict=True))

    def _compute_score(self, covariance: Vector, noise: float) -> float:
        """Return log p(values | covariance, noise) up to a constant.

        The factored matrix is the covariance plus the noise, with the values appended as its final
        row. Let L be the lower Cholesky factor without this row. The final row of the factor is
        then the solution x of L x = values.
        """
        whole = np.empty((self._points + 1, self._points + 1), order="F")
        whole[:-1, :-1] = covariance
        whole[-1, :-1] = self._values
        whole.reshape(-1, order="F")[:: self._points + 2] += noise
        whole[-1, -1] = _LARGE_VALUE
        factor, problem = dpotrf(whole, lower=1, clean=0, overwrite_a=1)
        if problem:
            return -math.inf
        solution = factor[-1, :-1]
        return float(-0.5 * solution @ solution - np.log(np.diagonal(factor)[:-1]).sum())

    def _draw_index(self, scores: Sequence[float] | Vector) -> int:
        chances = np.cumsum(np.exp(np.array(scores) - np.max(scores)))
        return int(np.searchsorted(chances, self._rng.random() * chances[-1]))

    def _draw_shapley_effects(self) -> Vector:
        """Draw a function, and return the variance over the space that each parameter causes.

        Each parameter of a pair causes half of the variance of the pair's effect: Shapley effects
        (Owen 2014). The function is drawn from the prior and corrected at the points (Wilson et al.
        2020).
        """
        effects = self._list_effects()
        weights = [self._rng.standard_normal(len(effect.deviations)) for _, effect in effects]
        drawn: Vector = math.sqrt(self._noise) * self._rng.standard_normal(size=(self._points,))
        drawn += math.sqrt(_CONSTANT) * float(self._rng.standard_normal())
        for (_, effect), own in zip(effects, weights, strict=True):
            drawn += effect.features @ own
        off = np.linalg.solve(self._compute_noisy_covariance(), self._values - drawn)
        found = np.zeros(self._count)
        for (pair, effect), own in zip(effects, weights, strict=True):
            corrected = effect.deviations * (own + effect.features.T @ off)
            variance = self._overlap[pair] * np.sum(np.square(corrected))
            for index in pair:
                found[index] += variance / 2
        return found

    def _list_effects(self) -> list[tuple[tuple[int, int], _Effect]]:
        """Return the effects of single parameters and of pairs, scaled by their drawn variances.

        Each effect follows the indices of its parameters, which are equal for a single parameter.
        """
        found: list[tuple[tuple[int, int], _Effect]] = []
        for index in np.flatnonzero(self._variances).tolist():
            effect = self._effects[index]
            scale = math.sqrt(self._variances[index])
            scaled = _Effect(scale * effect.deviations, scale * effect.features)
            found.append(((index, index), scaled))
        for pair in self._find_pairs() if self._coupling else []:
            first, second = (self._effects[index] for index in pair)
            scale = math.sqrt(self._coupling * self._variances[list(pair)].prod())
            deviations = np.outer(first.deviations, second.deviations).ravel()
            product = first.features[:, :, None] * second.features[:, None, :]
            features = product.reshape(self._points, -1)
            found.append((pair, _Effect(scale * deviations, scale * features)))
        return found


@dataclass(frozen=True)
class ExpectedLoss:
    """The loss that a model expects of the best evaluation."""

    trial: int
    loss: float
    evaluations: int
    """The number of evaluations from which the model has learned."""
    lowest_trial: int
    """The evaluation of which the model expects the lowest loss."""
    lowest_loss: float


def predict_best(
    evaluations: Sequence[Evaluation], described: Mapping[str, str], best: Evaluation
) -> ExpectedLoss | None:
    """Return the expected loss of the best evaluation; None if the model cannot predict it."""
    losses = compute_expected_losses(evaluations, read_space(described))
    if best.trial not in losses:
        return None
    lowest = min(losses, key=lambda trial: (losses[trial], trial))
    return ExpectedLoss(best.trial, losses[best.trial], len(losses), lowest, losses[lowest])


def compute_expected_losses(
    evaluations: Sequence[Evaluation], space: SearchSpace
) -> dict[int, float]:
    """Return the expected loss of each evaluation that the model has learned, by trial number.

    The result is empty if there are fewer than 20 different losses, or fewer than twice the number
    of parameters.
    """
    complete = select_complete(evaluations)
    needed = max(_MIN_COMPLETE, 2 * len(space.parameters))
    if len({evaluation.loss for evaluation in complete}) < needed:
        return {}
    chosen = select_learned(np.array([[evaluation.loss] for evaluation in complete]))
    learned = [complete[index] for index in chosen]
    losses = np.array([evaluation.loss for evaluation in learned])
    values = apply_power_transform(losses)
    encoding = GeneEncoding(space)
    params = [evaluation.params for evaluation in learned]
    points = encoding.encode_points(*compute_genes(params, encoding))
    model = GaussianProcess(encoding.gene_indices, _NOISE)
    for known in range(_FITS):
        model.fit(points, values, known=2**known)
    order = np.argsort(losses)
    expected = np.interp(model.means, values[order], losses[order])
    trials = [evaluation.trial for evaluation in learned]
    return dict(zip(trials, expected.tolist(), strict=True))


@dataclass(frozen=True)
class PriorAgreement:
    """The prior of a hyperparameter, with the expected value, and whether evaluations agree."""

    name: str
    value: Value
    confidence: str
    """How sure the prior is: "low", "medium" or "high"."""
    correlation: float | None
    """Spearman's correlation of the ranks of the prior density and of success.

    It is positive if losses are lower near the expected value, and None for fewer than 5
    evaluations, or without differences. Failed evaluations are the worst.
    """
    verdict: str
    """Whether evaluations "agree", "contradict" or are "undecided".

    Chance decides in at most one of ten cases.
    """


def compare_priors(
    evaluations: Sequence[Evaluation],
    space: Mapping[str, str],
    priors: Mapping[str, str],
    objectives: Objectives,
) -> list[PriorAgreement]:
    """Return for each prior whether the evaluations agree with it."""
    whole = read_space({**space, **{name: text for name, text in priors.items() if name in space}})
    if not whole.priors:
        return []
    ended = [e for e in evaluations if e.inherits is None and e.state in ("complete", "failed")]
    ended.sort(key=lambda evaluation: (evaluation.ended, evaluation.trial))
    informative = find_informative(np.array([math.isfinite(e.loss) for e in ended], bool))
    compared = [ended[index] for index in informative]
    if compared:
        costs = np.array([objectives.compute_costs(evaluation.values) for evaluation in compared])
        params = [evaluation.params for evaluation in compared]
        genes, active = compute_genes(params, GeneEncoding(whole))
        correlations, deviations = PriorModel(whole).compare(genes, active, costs)
    else:
        correlations = np.full(len(whole.priors), np.nan)
        deviations = np.zeros(len(whole.priors))
    known = [None if math.isnan(each) else each for each in correlations.tolist()]
    rows = zip(whole.priors.items(), known, deviations.tolist(), strict=True)
    return [
        PriorAgreement(
            name, value, whole.parameters[name].confidence, correlation, _judge(distance)
        )
        for (name, value), correlation, distance in rows
    ]


def _judge(deviations: float) -> str:
    if abs(deviations) < _SIGNIFICANT:
        return "undecided"
    return "agree" if deviations > 0 else "contradict"


def read_space(described: Mapping[str, str]) -> SearchSpace:
    """Return the search space that run.json describes, without its constraints."""
    return SearchSpace(**{name: parse_parameter(text) for name, text in described.items()})


def select_complete(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the complete evaluations with a finite loss that depends on hyperparameters alone.

    The losses of evaluations that started from a parent's checkpoint do not.
    """
    complete = [e for e in evaluations if e.state == "complete" and e.inherits is None]
    return [evaluation for evaluation in complete if math.isfinite(evaluation.loss)]


def compute_genes(
    params: Sequence[Mapping[str, Value]], encoding: GeneEncoding
) -> tuple[Vector, Mask]:
    """Return the genes of individuals, and whether each gene is active.

    Both have the shape `(individuals, genes)`. The gene of an inactive parameter is 0. Values are
    not checked, so that a run whose run.json was edited is still described.
    """
    parameters = encoding.space.parameters.items()
    genes = [
        [
            float(one.encode(individual[name])) if name in individual else 0.0
            for name, one in parameters
        ]
        for individual in params
    ]
    active = [[name in individual for name, _ in parameters] for individual in params]
    return np.array(genes), np.array(active)
