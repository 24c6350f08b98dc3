"""What a model of a run's losses expects of an individual: the lowest of many is lower than it should be.

It is the surrogate's model, of losses after a power transformation, but one that expects noise. On the hpobench tables,
of networks that were trained once each, the lowest of 64 losses was off by 0.28 of the distance from the best to the
median, and what the model expected by 0.08 (benchmarks/README.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpo.breeding.gaussian_process import GaussianProcess
from hpo.breeding.loss_transforms import apply_power_transform, select_learned
from hpo.results.genes import compute_genes, make_cube, select_complete
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

_MIN_EVALUATIONS = 20  # evaluations, and two for each parameter
_NOISE = 0.05  # of the variance; the fit finds what it really is
_FITS = 6  # each of which continues the one before


def compute_expected_losses(evaluations: Sequence[Evaluation], space: SearchSpace) -> dict[int, float]:
    """Return by their trials the losses that a model expects of the complete evaluations that it has learned from.

    Nothing is expected of too few. Evaluations that inherit are left out: their losses do not follow from their
    hyperparameters alone.
    """
    complete = select_complete(evaluations)
    if len({one.loss for one in complete}) < max(_MIN_EVALUATIONS, 2 * len(space.parameters)):
        return {}
    some = [complete[place] for place in select_learned(np.array([[one.loss] for one in complete]))]
    losses = np.array([one.loss for one in some])
    values = apply_power_transform(losses)
    cube = make_cube(space)
    points = cube.encode_points(*compute_genes([one.params for one in some], space))
    model = GaussianProcess(cube.gene_indices, _NOISE)
    for known in range(_FITS):
        model.fit(points, values, known=2**known)
    order = np.argsort(losses)
    expected = np.interp(model.means, values[order], losses[order])
    return {one.trial: float(loss) for one, loss in zip(some, expected, strict=True)}
