"""What a model of a run's losses expects of an individual: the lowest of many is lower than it should be.

It is the surrogate's model, of losses after a power transformation, but one that expects noise. On the hpobench tables,
of networks that were trained once each, the lowest of 64 losses was off by 0.28 of the distance from the best to the
median, and what the model expected by 0.08 (benchmarks/README.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.breeding.cube import Cube
from hpo.breeding.gaussian import GaussianProcess, Vector
from hpo.breeding.scores import learned_from, power_transformed
from hpo.store.evaluations import Evaluation

_LEAST = 20  # evaluations, and two for each parameter
_NOISE = 0.05  # of the variance; the fit finds what it really is
_FITS = 6  # each of which continues the one before


def expected_losses(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]) -> dict[int, float]:
    """Return by their trials the losses that a model expects of the complete evaluations that it has learned from.

    Nothing is expected of too few. Evaluations that inherit are left out: their losses do not follow from their
    hyperparameters alone. `distributions` are Optuna's, of all parameters.
    """
    founders = [one for one in evaluations if one.inherits is None]
    complete = [one for one in founders if one.state == "complete" and math.isfinite(one.loss)]
    if len({one.loss for one in complete}) < max(_LEAST, 2 * len(distributions)):
        return {}
    some = [complete[place] for place in learned_from(np.array([[one.loss] for one in complete]))]
    losses = np.array([one.loss for one in some])
    values = power_transformed(losses)
    cube = Cube(*_limits(distributions))
    points = cube.points(*_genes(some, distributions))
    model = GaussianProcess(cube.scale_of, _NOISE)
    for known in range(_FITS):
        model.fit(points, values, known=2**known)
    order = np.argsort(losses)
    expected = np.interp(model.means, values[order], losses[order])
    return {one.trial: float(loss) for one, loss in zip(some, expected, strict=True)}


def _limits(distributions: Mapping[str, Any]) -> tuple[Vector, Vector, npt.NDArray[np.bool_]]:
    """Return the lowest and the highest gene of each parameter, and which are categories."""
    unordered = np.array([hasattr(one, "choices") for one in distributions.values()])
    high = [len(one.choices) - 1 if hasattr(one, "choices") else _gene(one.high, one) for one in distributions.values()]
    low = [0.0 if hasattr(one, "choices") else _gene(one.low, one) for one in distributions.values()]
    return np.array(low, float), np.array(high, float), unordered


def _genes(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """Return the genes of individuals, and which exist, both shape (individuals, parameters)."""
    existing = np.array([[name in one.params for name in distributions] for one in evaluations])
    genes = [
        [_gene(one.params[name], own) if name in one.params else 0.0 for name, own in distributions.items()]
        for one in evaluations
    ]
    return np.array(genes, float), existing


def _gene(value: Any, distribution: Any) -> float:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return float(choices.index(value))
    return math.log(value) if distribution.log else float(value)
