"""Estimate the expected loss of evaluations by a model.

The lowest of many noisy losses is too optimistic. The model is the Gaussian process of the
surrogate on power-transformed losses, but with a prior that expects noise. Its accuracy on the
hpobench tables is in benchmarks/search-quality.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpo.breeding.encoding import GeneEncoding
from hpo.breeding.gaussian_process import GaussianProcess
from hpo.breeding.loss_transforms import apply_power_transform, select_learned
from hpo.results.genes import compute_genes, read_space, select_complete
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
    evaluations: Sequence[Evaluation], described: Mapping[str, str], best: Evaluation
) -> ExpectedLoss | None:
    """Return the expected loss of the best evaluation; None if the model cannot predict it.

    Args:
        described: The definition of each parameter by its name, as in run.json.

    Raises:
        ValueError: If a definition is not valid, or a value is not valid for its parameter.
    """
    losses = compute_expected_losses(evaluations, read_space(described))
    if best.trial not in losses:
        return None
    lowest = min(losses, key=lambda trial: (losses[trial], trial))
    return ExpectedLoss(best.trial, losses[best.trial], len(losses), lowest, losses[lowest])


def compute_expected_losses(
    evaluations: Sequence[Evaluation], space: SearchSpace
) -> dict[int, float]:
    """Return the expected loss of each evaluation that the model has learned, by trial number.

    Evaluations that started from a parent's checkpoint are left out, because their losses do not
    depend on their hyperparameters alone.

    Returns:
        The expected losses. Empty if there are fewer than 20 different losses, or fewer than twice
        the number of parameters.
    """
    complete = select_complete(evaluations)
    needed = max(_MIN_EVALUATIONS, 2 * len(space.parameters))
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
