"""Estimate the expected loss of evaluations by a model, because the lowest of many noisy losses is too optimistic.

The model is the Gaussian process of the surrogate on power-transformed losses, but with a prior
that expects noise. Its accuracy on the hpobench tables is in benchmarks/search-quality.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpo.breeding.encoding import GeneEncoding
from hpo.breeding.gaussian_process import GaussianProcess
from hpo.breeding.loss_transforms import apply_power_transform, select_learned
from hpo.results.genes import compute_genes, select_complete
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

_MIN_EVALUATIONS = 20  # At least two for each parameter are needed, too.
_NOISE = 0.05  # Prior share of noise in the variance. The fit estimates the real share.
_FITS = 6  # Each fit continues the previous one.


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
    evaluations: Sequence[Evaluation], space: SearchSpace, best: Evaluation
) -> ExpectedLoss | None:
    """Return the expected loss of the best evaluation; None if the model cannot predict it."""
    losses = compute_expected_losses(evaluations, space)
    if best.trial not in losses:
        return None
    lowest = min(losses, key=lambda trial: (losses[trial], trial))
    return ExpectedLoss(best.trial, losses[best.trial], len(losses), lowest, losses[lowest])


def compute_expected_losses(
    evaluations: Sequence[Evaluation], space: SearchSpace
) -> dict[int, float]:
    """Return the expected loss of each evaluation from which the model has learned, by trial number.

    Evaluations that started from a parent's checkpoint are left out, because their losses do not
    depend on their hyperparameters alone.

    Returns:
        The expected losses. Empty if there are fewer than 20 different losses, or fewer than twice
        the number of parameters.
    """
    complete = select_complete(evaluations)
    if len({evaluation.loss for evaluation in complete}) < max(
        _MIN_EVALUATIONS, 2 * len(space.parameters)
    ):
        return {}
    learned = [
        complete[index]
        for index in select_learned(np.array([[evaluation.loss] for evaluation in complete]))
    ]
    losses = np.array([evaluation.loss for evaluation in learned])
    values = apply_power_transform(losses)
    encoding = GeneEncoding(space)
    points = encoding.encode_points(
        *compute_genes([evaluation.params for evaluation in learned], space)
    )
    model = GaussianProcess(encoding.gene_indices, _NOISE)
    for known in range(_FITS):
        model.fit(points, values, known=2**known)
    order = np.argsort(losses)
    expected = np.interp(model.means, values[order], losses[order])
    return {
        evaluation.trial: float(loss) for evaluation, loss in zip(learned, expected, strict=True)
    }
