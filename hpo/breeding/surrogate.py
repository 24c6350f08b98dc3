"""Which candidates are worth an evaluation: two models of all losses of a run, of which one is asked each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import cdist

from hpo.breeding.acquisition import expected_improvement, lower_confidence_bound
from hpo.breeding.encoding import UnitCubeEncoding
from hpo.breeding.gaussian_process import GaussianProcess, Vector
from hpo.breeding.loss_transforms import apply_power_transform, compute_normal_scores, select_learned

if TYPE_CHECKING:
    from hpo.breeding.evaluation_history import EvaluationHistory
    from hpo.breeding.surrogate_data import SurrogateSample

_EXPLORATION_SHARE = 0.5  # the share of suggestions that explore
# What is nearer to an individual than this share of each range is as good as known: a model that is too sure of itself
# would have the best again and again otherwise, 25 times in 34 on a network (benchmarks/README.md).
_KNOWN_DISTANCE = 0.01


class Surrogate:
    """Says how much may be hoped of candidates, from what was tried on all islands and what is in flight.

    One model learns the places of losses in their order, whatever their scale, and explores: it prefers what has the
    lowest lower confidence bound, mean - 3 deviations. The other one learns losses that a power transformation has
    made as normal as can be, so that it knows how much better the best are, and prefers what is expected to improve on
    them most. The first is the better one where losses are noisy and parameters are categories, the second one where
    losses are smooth functions of numbers. Each suggestion asks one of the two, drawn at random, which is nearly as
    good as the better one in either case (benchmarks/README.md). Of several objectives, each has two models of its own.
    The context of an evaluation, of `facts` numbers, is a further input of all models.
    """

    def __init__(self, past: EvaluationHistory, draws: np.random.Generator, context_size: int = 0) -> None:
        self._history = past
        self._generator = draws
        self._encoding = UnitCubeEncoding(past.low, past.high, past.unordered)
        parameters = len(past.low)
        scale_of = np.append(self._encoding.gene_indices, np.arange(parameters, parameters + context_size))
        self._models = [(GaussianProcess(scale_of), GaussianProcess(scale_of)) for _ in past.objectives.names]

    def learn(self, sample: SurrogateSample) -> Callable[..., Vector]:
        """Learn from a sample; return a function that gives the merit of each of some candidates' genes.

        Merits, shape (candidates,), compare with each other alone: the higher, the better. The function also takes
        the highest merit that is of no use (whether what has no more is near to something known is not looked at), and
        the precision, of which a single one is good for screening.
        """
        chosen, here = select_learned(sample.costs), sample.context
        tried = self._encode_points(sample.genes[chosen], sample.contexts[chosen])
        running = self._encode_points(sample.running, sample.running_contexts)
        daring = self._generator.random() < _EXPLORATION_SHARE
        models = []
        for costs, (places, sizes) in zip(sample.costs[chosen].T, self._models, strict=True):
            model, values = (places, compute_normal_scores(costs)) if daring else (sizes, apply_power_transform(costs))
            model.fit(tried, values, known=len(sample.costs))
            model.assume_predictions(running)
            models.append(model)
        # The lowest cost in this context: another context may allow lower costs.
        lowest = (
            float(models[0].predict(self._encode_points(sample.genes[chosen], here))[0].min()) if len(here) else None
        )
        merit = (lower_confidence_bound if daring else expected_improvement)(models, self._generator, lowest)
        known = np.vstack([tried, running])

        def compute_merits(
            candidates: Vector, useless: float = -np.inf, precision: type[np.floating[Any]] = np.float64
        ) -> Vector:
            points = self._encode_points(candidates, here)
            means, deviations = zip(*(model.predict(points, precision) for model in models), strict=True)
            merits = merit(np.array(means), np.array(deviations))
            useful = np.flatnonzero(merits > useless)  # a fifth of all, which take 0.5 ms more of a suggestion
            near = cdist(points[useful], known, "chebyshev").min(axis=1) < _KNOWN_DISTANCE
            merits[useful[near]] = -np.inf
            return merits

        return compute_merits

    def _encode_points(self, genes: Vector, contexts: Vector) -> Vector:
        points = self._encoding.encode_points(genes, self._history.find_active(genes))
        return np.hstack([points, np.broadcast_to(contexts, (len(genes), contexts.shape[-1]))])
