"""Compute the merit of candidates by a surrogate: by models of losses, failures and durations.

An acquisition function takes means and standard deviations, both of shape `(objectives,
candidates)`. It returns merits of shape `(candidates,)`. The higher a merit, the better the
candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

from hpo.breeding.encoding import Mask, Vector
from hpo.breeding.evaluation_history import EvaluationHistory, SurrogateSample, find_informative
from hpo.breeding.gaussian_process import (
    GaussianProcess,
    apply_power_transform,
    compute_normal_scores,
    select_learned,
)
from hpo.dominance import find_non_dominated

Acquisition = Callable[[Vector, Vector], Vector]
Precision = type[np.floating[Any]]
# Returns the logarithm of a factor of merits, at most 0, from the genes and the points of
# candidates and a precision.
LogWeight = Callable[[Vector, Vector, Precision], Vector]

_EXPLORATION_SHARE = 0.5  # The share of suggestions that explore.
# A candidate that is nearer to a known individual, as a share of each range, counts as known.
# Otherwise, an overconfident model would suggest the best again and again
# (benchmarks/search-quality.md).
_KNOWN_DISTANCE = 0.01
_MOST_FAILURES = 256  # The latest failures, with which candidates are compared.

# Of the acquisition functions.
# Distance of the lower confidence bound from the mean, in standard deviations.
_BOUND_DEVIATIONS = 3.0
_RAYS = 64
# Distance of the reference point from the front, as a share of the extent of the front.
_MARGIN = 0.1
# Smooths the gain at 0, so that a candidate without a gain is better the closer it is to the front.
_SMOOTHING = 0.01
# The same for the gain of a bound, in standard deviations of the learned values.
_BOUND_SMOOTHING = 0.1
_FAR = -30.0

# Of the success model.
_MOST_EVALUATIONS = 256  # The latest ones. The time to learn grows with the cube of their number.
_STEP = 64  # The oldest are left out in blocks, because the model then learns from the beginning.
_AMPLITUDE = 10.0  # Standard deviation of the latent function: most regions surely succeed or fail.
_ITERATIONS = 4  # Of each fit, which continues the previous one.
# A suggestion that fails costs more than a suggestion without a gain. Twice this exponent lowers
# the merit far from all evaluations so much that a search stays near its first successes if most
# evaluations fail (benchmarks/failures.md).
_CAUTION = 4.0

# Of the duration model.
_NOISE = 0.05  # Prior share of noise in the variance of log durations.
_MIN_KNOWN = 5
# Durations do not matter if the standard deviation of their logarithms is at most the first number:
# two of three then differ by a factor of at most 1.5 from the mean. They matter fully from the sum
# of both on (benchmarks/durations.md).
_EQUAL = 0.4
_RANGE = 0.5


class Surrogate:
    """Predicts the merit of candidates from all ended and pending evaluations of the run.

    Two Gaussian processes learn different transformations of the losses:

    - The first model learns normal scores, which depend only on the order of the losses. It
      explores: it prefers the lowest lower confidence bound, mean - 3 standard deviations. It is
      better if losses are noisy and parameters are categorical.
    - The second model learns power-transformed losses, which preserve differences between the best
      losses. It prefers the largest expected improvement. It is better if losses are smooth
      functions of numbers.

    Each suggestion uses one of the two, drawn at random. This is nearly as good as the better model
    in both cases (benchmarks/search-quality.md). With several objectives, each objective has its
    own two models.

    Both models learn only from evaluations that succeeded. The merit of a candidate is lower if its
    evaluation probably fails, or if the user's priors do not expect it to be good. While time is
    scarce, it is also lower if the evaluation takes long.

    The context values of an evaluation, of which there are `context_size`, are additional inputs.
    """

    def __init__(
        self, history: EvaluationHistory, rng: np.random.Generator, context_size: int = 0
    ) -> None:
        self._history = history
        self._generator = rng
        genes = history.encoding.gene_indices
        context = np.arange(genes.max() + 1, genes.max() + 1 + context_size)
        scale_indices = np.append(genes, context)
        self._models = [
            (GaussianProcess(scale_indices), GaussianProcess(scale_indices))
            for _ in history.objectives.names
        ]
        self._success_model = SuccessModel(scale_indices)
        self._duration_model = DurationModel(scale_indices)

    def learn(self, sample: SurrogateSample) -> Callable[..., Vector]:
        """Learn from a sample, and return a function that computes the merits of candidates.

        Pending evaluations are learned as if their losses were as predicted. The first argument of
        the function is the genes of candidates. Candidates that nearly equal a known evaluation get
        the merit minus infinity. The second argument is a merit. To save time, candidates with at
        most this merit keep it: they are not compared with known evaluations, and what else lowers
        merits is ignored. The third argument is the floating point type. Single precision is enough
        for screening.
        """
        succeeded = sample.succeeded
        chosen = np.flatnonzero(succeeded)[select_learned(sample.costs[succeeded])]
        tried = self._encode_points(sample.genes[chosen], sample.contexts[chosen])
        running = self._encode_points(sample.running, sample.running_contexts)
        explores = self._generator.random() < _EXPLORATION_SHARE
        models = []
        for costs, (score_model, loss_model) in zip(
            sample.costs[chosen].T, self._models, strict=True
        ):
            if explores:
                score_model.fit(tried, compute_normal_scores(costs), known=len(sample.costs))
                models.append(score_model)
            else:
                loss_model.fit(tried, apply_power_transform(costs), known=len(sample.costs))
                models.append(loss_model)
            models[-1].assume_predictions(running)
        lowest = models[0].lowest_mean
        if len(sample.context):
            # The lowest cost in this context: another context may allow lower costs.
            points = self._encode_points(sample.genes[chosen], sample.context)
            lowest = float(models[0].predict(points)[0].min())
        make_acquisition = lower_confidence_bound if explores else expected_improvement
        acquire = make_acquisition(models, self._generator, lowest)
        failed = np.flatnonzero(~succeeded)[-_MOST_FAILURES:]
        failures = self._encode_points(sample.genes[failed], sample.contexts[failed])
        known = np.vstack([tried, running, failures])
        weights = self._learn_weights(sample, chosen, tried)

        def compute_merits(
            candidates: Vector, useless: float = -np.inf, precision: Precision = np.float64
        ) -> Vector:
            points = self._encode_points(candidates, sample.context)
            predicted = [model.predict(points, precision) for model in models]
            means, deviations = np.stack(predicted, axis=1)
            merits = acquire(means, deviations)
            # A fifth of all. Checking all would take 0.5 ms more.
            useful = np.flatnonzero(merits > useless)
            for compute_log_weight in weights:  # They only lower merits.
                merits[useful] += compute_log_weight(candidates[useful], points[useful], precision)
            near = cdist(points[useful], known, "chebyshev").min(axis=1) < _KNOWN_DISTANCE
            merits[useful[near]] = -np.inf
            return merits

        return compute_merits

    def _learn_weights(
        self, sample: SurrogateSample, chosen: npt.NDArray[np.int64], tried: Vector
    ) -> list[LogWeight]:
        """Learn from a sample what lowers the merit of candidates, apart from losses."""
        weights: list[LogWeight] = []
        succeeded = sample.succeeded
        known = len(sample.costs)
        informative = select_latest(find_informative(succeeded))
        if not succeeded[informative].all():
            points = self._encode_points(sample.genes[informative], sample.contexts[informative])
            self._success_model.fit(points, succeeded[informative], known)
            weights.append(lambda _, *others: self._success_model.compute_log_weight(*others))
        budget = self._history.time_budget
        scarcity = 0.0 if budget is None else budget.compute_scarcity(self._history.ended_count)
        if scarcity > 0 and self._duration_model.fit(
            tried, sample.seconds[chosen], scarcity, known
        ):
            weights.append(lambda _, *others: self._duration_model.compute_log_weight(*others))
        # An heir begins where its parent has ended. Priors do not say what is good from there.
        if not len(sample.context) and (priors := self._history.fit_prior_model()):
            find_active = self._history.encoding.find_active
            weights.append(lambda genes, *_: priors.compute_log_weight(genes, find_active(genes)))
        return weights

    def _encode_points(self, genes: Vector, contexts: Vector) -> Vector:
        encoding = self._history.encoding
        points = encoding.encode_points(genes, encoding.find_active(genes))
        return np.hstack([points, np.broadcast_to(contexts, (len(genes), contexts.shape[-1]))])


def lower_confidence_bound(
    models: Sequence[GaussianProcess], rng: np.random.Generator, lowest: float
) -> Acquisition:
    """Return an acquisition function that prefers candidates with a low lower confidence bound.

    The bound is the mean minus 3 standard deviations. For several objectives, the function prefers
    candidates whose bounds add the largest hypervolume to the front of the means. The method is
    described by Srinivas et al., Gaussian process optimization in the bandit setting (2010).

    There is a model for each objective. `lowest` is the mean to improve on, of a single objective.
    """
    if len(models) == 1:
        return lambda mean, deviation: _log_softplus(
            (lowest - mean[0] + _BOUND_DEVIATIONS * deviation[0]) / _BOUND_SMOOTHING
        )
    gain = HypervolumeImprovement(np.array([model.means for model in models]), rng)
    return lambda mean, deviation: gain((mean - _BOUND_DEVIATIONS * deviation)[None])


def expected_improvement(
    models: Sequence[GaussianProcess], rng: np.random.Generator, lowest: float
) -> Acquisition:
    """Return an acquisition function that prefers the largest expected improvement on `lowest`.

    For several objectives, it prefers the largest expected hypervolume improvement, averaged over
    random draws from the predictions. The arguments are those of `lower_confidence_bound`. The
    method is described by Jones et al., Efficient global optimization of expensive black-box
    functions (1998), equation 15.
    """
    if len(models) == 1:
        return lambda mean, deviation: (
            np.log(deviation[0]) + log_expected_improvement((lowest - mean[0]) / deviation[0])
        )
    gain = HypervolumeImprovement(np.array([model.means for model in models]), rng)
    drawn = rng.standard_normal((_RAYS, len(models), 1))
    return lambda mean, deviation: gain(mean + deviation * drawn)


class HypervolumeImprovement:
    """Computes the hypervolume that candidates would add to a Pareto front of any dimension.

    Rays in random directions start at the reference point. The reach of a front along a ray is a
    power of the distance to the front. The exponent is the number of objectives. The hypervolume is
    proportional to the average reach of all rays (Golovin and Zhang, Random hypervolume
    scalarizations for provable multi-objective black box optimization, 2020, lemma 5). So a
    candidate adds the average reach by which it exceeds the front. The front is that of the known
    individuals, with predicted means of shape `(objectives, individuals)`.
    """

    def __init__(self, known: Vector, rng: np.random.Generator) -> None:
        self._reference = compute_reference_point(known)[:, None]
        span = self._reference - known.min(axis=1, keepdims=True)
        rays = np.abs(rng.standard_normal((_RAYS, len(known), 1)))
        rays /= np.linalg.norm(rays, axis=1, keepdims=True)
        self._steps = rays * np.where(span > 0, span, 1.0)
        self._front_reach = self._measure_reach(known[None]).max(axis=1, keepdims=True)

    def __call__(self, costs: Vector) -> Vector:
        """Return the logarithm of the hypervolume that each candidate adds.

        The predicted costs have the shape `(rays, objectives, candidates)` if each ray has its own
        random draw from the predictions. Otherwise, it is `(1, objectives, candidates)`.
        """
        ahead = (self._measure_reach(costs) - self._front_reach) / _SMOOTHING
        gained: Vector = np.logaddexp.reduce(_log_softplus(ahead), axis=0)
        return gained

    def _measure_reach(self, costs: Vector) -> Vector:
        """Return the reach of candidates along rays, shape `(rays, candidates)`."""
        far = ((self._reference - costs) / self._steps).min(axis=1)
        reached: Vector = np.copysign(np.abs(far) ** len(self._reference), far)
        return reached


def _log_softplus(values: Vector) -> Vector:
    """Return log(log(1 + exp(values))). Its limit far below zero is `values`."""
    return np.where(values < _FAR, values, np.log(np.logaddexp(0.0, np.maximum(values, _FAR))))


def compute_reference_point(known: Vector) -> Vector:
    """Return the reference point, from which hypervolumes are measured.

    In each objective, the point is higher than the highest mean of the front, by a tenth of the
    range of the front. If the median of all known means is even higher, the point is at the median.
    The known means have the shape `(objectives, individuals)`.
    """
    front = known[:, find_non_dominated(known.T)]
    worst = front.max(axis=1)
    margin = _MARGIN * (worst - front.min(axis=1))
    reference: Vector = np.maximum(worst + margin, np.median(known, axis=1))
    return reference


def log_expected_improvement(standardized: Vector) -> Vector:
    """Return the logarithm of the expected improvement, for a standard deviation of 1.

    It is log(density(z) + z * distribution(z)) of the standard normal distribution, for predicted
    improvements z, divided by their standard deviations. It is accurate even if z is far below zero
    (Ament et al., Unexpected improvements to expected improvement for Bayesian optimization, 2023,
    equation 9).
    """
    z = np.minimum(standardized, -1.0)
    density = -(z**2) / 2 - math.log(2 * math.pi) / 2
    with np.errstate(divide="ignore"):
        share = np.log1p(z * math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2)))
    far = np.where(z < -1e3, -2 * np.log(-z), share)
    z = np.maximum(standardized, -1.0)
    near = np.log(np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) + z * ndtr(z))
    return np.where(standardized < -1.0, density + far, near)


class SuccessModel:
    """Predicts the probability of success by a Gaussian process classifier with a probit link.

    Evaluations fail where networks need too much memory, where losses become infinite, or where a
    combination of hyperparameters is invalid. A failure has no loss, so the models of the losses do
    not learn from failures.

    A latent function of the hyperparameters is modelled by a Gaussian process. The probability of
    success is the standard normal distribution function of the latent value. The posterior is
    approximated by variational inference (Girolami and Rogers, Variational Bayesian multinomial
    probit regression with Gaussian process priors, 2006, equation 8): targets are the means of
    truncated normal distributions, and they and the latent values are updated in turn.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64]) -> None:
        self._model = GaussianProcess(scale_indices, noise=_AMPLITUDE**-2)
        self._offset = 0.0
        self._latent: Vector = np.empty(0)

    def fit(self, points: Vector, succeeded: Mask, known: int) -> None:
        """Learn which evaluations, of all that are `known`, succeeded at which points."""
        # The latent value far from all evaluations. It corresponds to the share of successes.
        self._offset = float(ndtri((succeeded.sum() + 1) / (len(succeeded) + 2)))
        signs = np.where(succeeded, 1.0, -1.0)
        # The latent values of the previous fit are close to the new ones, unless the oldest
        # evaluations were left out.
        known_latent = self._latent if len(self._latent) <= len(points) else np.empty(0)
        new_latent = np.full(len(points) - len(known_latent), self._offset)
        latent = np.append(known_latent, new_latent)
        for iteration in range(_ITERATIONS):
            log_density = -(latent**2) / 2 - math.log(2 * math.pi) / 2
            targets = latent + signs * np.exp(log_density - log_ndtr(signs * latent))
            values = (targets - self._offset) / _AMPLITUDE
            # Only one iteration may fit the scales, when the targets are already close to their
            # final values.
            if iteration == _ITERATIONS // 2:
                self._model.fit(points, values, known)
            else:
                self._model.learn_values(points, values)
            latent = self._offset + _AMPLITUDE * self._model.means
        self._latent = latent

    def compute_log_weight(self, points: Vector, precision: Precision = np.float64) -> Vector:
        """Return the logarithm of the factor by which the chance to fail reduces merits.

        The factor is the fourth power of the probability of success.
        """
        mean, deviation = self._model.predict(points, precision)
        latent = self._offset + _AMPLITUDE * mean
        weight: Vector = _CAUTION * log_ndtr(latent / np.sqrt(1 + (_AMPLITUDE * deviation) ** 2))
        return weight


def select_latest(evaluations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the latest evaluations, at most 256, from which the success model learns."""
    surplus = max(0, len(evaluations) - _MOST_EVALUATIONS)
    return evaluations[-(-surplus // _STEP) * _STEP :]


class DurationModel:
    """Predicts the logarithm of durations by a Gaussian process, to prefer short evaluations.

    The merit of a candidate is divided by a power of its predicted duration, as the expected
    improvement per second is (Snoek et al., Practical Bayesian optimization of machine learning
    algorithms, 2012, section 3.2). The exponent falls to 0 at the time limit (Lee et al.,
    Cost-aware Bayesian optimization, 2020, section 4): otherwise, the search would avoid long
    evaluations until the end, even if the best one is long.
    """

    def __init__(self, scale_indices: npt.NDArray[np.int64]) -> None:
        self._model = GaussianProcess(scale_indices, _NOISE)
        self._deviation = 0.0
        self._exponent = 0.0

    def fit(self, points: Vector, seconds: Vector, scarcity: float, known: int) -> bool:
        """Learn durations, and return whether they matter.

        They do not if they hardly differ, or if fewer than 5 are known. An unknown duration is NaN
        or not positive.
        """
        usable = seconds > 0
        logs = np.log(seconds[usable])
        if len(logs) < _MIN_KNOWN:
            return False
        self._deviation = float(logs.std())
        self._exponent = scarcity * min(1.0, max(0.0, (self._deviation - _EQUAL) / _RANGE))
        if not self._exponent:
            return False
        self._model.fit(points[usable], (logs - np.median(logs)) / self._deviation, known)
        return True

    def compute_log_weight(self, points: Vector, precision: Precision = np.float64) -> Vector:
        """Return the logarithm of the factor by which the duration reduces merits.

        The factor is a power of 1 + seconds / median. So candidates that are much shorter than the
        median are hardly better than each other: most of the time is spent elsewhere.
        """
        mean, _ = self._model.predict(points, precision)
        weight: Vector = -self._exponent * np.logaddexp(0.0, self._deviation * mean)
        return weight
