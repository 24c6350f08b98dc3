"""Compute the merit of candidates by a surrogate.

A surrogate has two models. Each suggestion (choice of one individual to evaluate) uses one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from hpo.breeding.acquisition import expected_improvement, lower_confidence_bound
from hpo.breeding.duration_model import DurationModel
from hpo.breeding.encoding import UnitCubeEncoding
from hpo.breeding.gaussian_process import GaussianProcess, Vector
from hpo.breeding.loss_transforms import apply_power_transform, compute_normal_scores, select_learned
from hpo.breeding.success_model import SuccessModel, find_informative, select_latest

if TYPE_CHECKING:
    from hpo.breeding.evaluation_history import EvaluationHistory
    from hpo.breeding.surrogate_data import SurrogateSample

# Returns the logarithm of a factor of merits, at most 0, from the genes and the points of candidates and a precision.
LogWeight = Callable[[Vector, Vector, type[np.floating[Any]]], Vector]

_EXPLORATION_SHARE = 0.5  # The share of suggestions that explore.
# A candidate that is nearer to a known individual, as a share of each range, counts as known. Otherwise, an
# overconfident model would suggest the best again and again (benchmarks/search-quality.md).
_KNOWN_DISTANCE = 0.01
_MOST_FAILURES = 256  # The latest failures, with which candidates are compared.


class Surrogate:
    """Predicts the merit of candidates from all ended and pending evaluations of the run.

    Two Gaussian processes learn different transformations of the losses:

    - The first model learns normal scores, which depend only on the order of the losses. It explores: it prefers the
      lowest lower confidence bound, mean - 3 standard deviations. It is better if losses are noisy and parameters are
      categorical.
    - The second model learns power-transformed losses, which preserve differences between the best losses. It prefers
      the largest expected improvement. It is better if losses are smooth functions of numbers.

    Each suggestion uses one of the two, drawn at random. This is nearly as good as the better model in both cases
    (benchmarks/search-quality.md). With several objectives, each objective has its own two models.

    Both models learn only from evaluations that succeeded. The merit of a candidate is lower the more likely its
    evaluation fails, the less the user's priors expect it to be good, and, while time is scarce, the longer it takes.

    Args:
        rng: The random number generator.
        context_size: The number of context values of an evaluation, which are additional inputs of the models.
    """

    def __init__(self, history: EvaluationHistory, rng: np.random.Generator, context_size: int = 0) -> None:
        self._history = history
        self._generator = rng
        self._encoding = UnitCubeEncoding(history.low, history.high, history.unordered)
        parameters = len(history.low)
        scale_indices = np.append(self._encoding.gene_indices, np.arange(parameters, parameters + context_size))
        self._models = [
            (GaussianProcess(scale_indices), GaussianProcess(scale_indices)) for _ in history.objectives.names
        ]
        self._success_model = SuccessModel(scale_indices)
        self._duration_model = DurationModel(scale_indices)

    def learn(self, sample: SurrogateSample) -> Callable[..., Vector]:
        """Learn from a sample, and return a function that computes the merits of candidates.

        Pending evaluations are learned as if their losses were as predicted.

        Args:
            sample: The evaluations to learn from.

        Returns:
            A function that returns merits, shape `(candidates,)`: the higher, the better. Its first argument is the
            genes of candidates, shape `(candidates, genes)`. Candidates that nearly equal a known evaluation get the
            merit minus infinity. The second argument is a merit. To save time, candidates with at most this merit keep
            it: they are not compared with known evaluations, and what else lowers merits is ignored. The third argument
            is the floating point type. Single precision is enough for screening.
        """
        context, succeeded = sample.context, sample.succeeded
        chosen = np.flatnonzero(succeeded)[select_learned(sample.costs[succeeded])]
        tried = self._encode_points(sample.genes[chosen], sample.contexts[chosen])
        running = self._encode_points(sample.running, sample.running_contexts)
        explores = self._generator.random() < _EXPLORATION_SHARE
        models = []
        for costs, (score_model, loss_model) in zip(sample.costs[chosen].T, self._models, strict=True):
            model, values = (
                (score_model, compute_normal_scores(costs)) if explores else (loss_model, apply_power_transform(costs))
            )
            model.fit(tried, values, known=len(sample.costs))
            model.assume_predictions(running)
            models.append(model)
        # The lowest cost in this context: another context may allow lower costs.
        lowest = None
        if len(context):
            lowest = float(models[0].predict(self._encode_points(sample.genes[chosen], context))[0].min())
        acquire = (lower_confidence_bound if explores else expected_improvement)(models, self._generator, lowest)
        failed = np.flatnonzero(~succeeded)[-_MOST_FAILURES:]
        known = np.vstack([tried, running, self._encode_points(sample.genes[failed], sample.contexts[failed])])
        weights = self._learn_weights(sample, chosen, tried)

        def compute_merits(
            candidates: Vector, useless: float = -np.inf, precision: type[np.floating[Any]] = np.float64
        ) -> Vector:
            points = self._encode_points(candidates, context)
            means, deviations = zip(*(model.predict(points, precision) for model in models), strict=True)
            merits = acquire(np.array(means), np.array(deviations))
            useful = np.flatnonzero(merits > useless)  # A fifth of all. Checking all would take 0.5 ms more.
            for compute_log_weight in weights:  # They only lower merits.
                merits[useful] += compute_log_weight(candidates[useful], points[useful], precision)
            near = cdist(points[useful], known, "chebyshev").min(axis=1) < _KNOWN_DISTANCE
            merits[useful[near]] = -np.inf
            return merits

        return compute_merits

    def _learn_weights(self, sample: SurrogateSample, chosen: npt.NDArray[np.int64], tried: Vector) -> list[LogWeight]:
        """Learn from a sample what lowers the merit of candidates, apart from losses.

        Args:
            sample: The evaluations to learn from.
            chosen: The indices of the evaluations from which the models of the losses learn.
            tried: Their points, shape `(chosen, coordinates)`.
        """
        weights: list[LogWeight] = []
        succeeded = sample.succeeded
        informative = select_latest(find_informative(succeeded))
        if not succeeded[informative].all():
            points = self._encode_points(sample.genes[informative], sample.contexts[informative])
            self._success_model.fit(points, succeeded[informative], known=len(sample.costs))
            weights.append(lambda _, points, precision: self._success_model.compute_log_weight(points, precision))
        if (scarcity := self._history.time_scarcity) > 0:
            durations = self._duration_model
            if durations.fit(tried, sample.seconds[chosen], scarcity, known=len(sample.costs)):
                weights.append(lambda _, points, precision: durations.compute_log_weight(points, precision))
        # An heir begins where its parent has ended. Priors do not say what is good from there.
        if not len(sample.context) and (priors := self._history.fit_prior_model()):
            weights.append(lambda genes, *_: priors.compute_log_weight(genes, self._history.find_active(genes)))
        return weights

    def _encode_points(self, genes: Vector, contexts: Vector) -> Vector:
        points = self._encoding.encode_points(genes, self._history.find_active(genes))
        return np.hstack([points, np.broadcast_to(contexts, (len(genes), contexts.shape[-1]))])
