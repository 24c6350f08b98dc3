"""Estimate how much each hyperparameter matters for the loss, over the whole search space.

A search mostly evaluates individuals with low losses. In them, unimportant hyperparameters are
inherited together with important ones. Therefore the importances are computed from a model of the
whole space, and not directly from the evaluations.
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
from threadpoolctl import threadpool_limits

from hpo.breeding.encoding import GeneEncoding, Vector
from hpo.results.anova import AnovaSampler, Effect
from hpo.results.genes import compute_genes, read_space, select_complete
from hpo.space import Categorical, Parameter, SearchSpace
from hpo.store.evaluations import Evaluation

_MIN_COMPLETE = 20
_MAX_EVALUATIONS = 128  # The time of the model grows with the cube of the number of evaluations.
# Chains of the sampler; discarded sweeps and draws of each chain.
_CHAINS, _BURN_IN, _DRAWS = 3, 12, 16
_INTERVAL = (0.05, 0.95)
_OFFSETS = (0.1, 0.3, 1.0, 3.0, 10.0)  # Added before the logarithm is taken, see `_transform`.
# Prior log odds of untransformed losses. The sampler rarely leaves a transformation once the
# effects fit it.
_IDENTITY_LOG_ODDS = 20.0
# Limit of the distance from the lowest loss, in units of the median distance.
_MAX_DISTANCE = 1e100
# Points of the space, to estimate how often conditional parameters are active.
_SPACE_SAMPLES = 500

# The hyperparameters and the loss of an evaluation.
_KnownLoss = tuple[tuple[tuple[str, Any], ...], float]


@dataclass(frozen=True)
class Importance:
    """The importance of one hyperparameter."""

    name: str
    """The name of the hyperparameter."""
    share: float
    """The share of the variance of the loss over the search space, from 0 to 1. The shares of a run add up to 1."""
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
    """Estimate the importance of each hyperparameter by a functional ANOVA, see `hpo.results.anova`.

    Constraints of the search space are ignored. Evaluations that started from a parent's checkpoint
    are left out, because their losses do not depend on their hyperparameters alone.

    Args:
        described: The definition of each parameter by its name, as in run.json.

    Returns:
        The importances, the highest first. Empty if fewer than 20 evaluations are complete or all
        losses are equal.

    Raises:
        ValueError: If a definition is not valid, or a value is not valid for its parameter.
    """
    complete = select_complete(evaluations)
    known = tuple((tuple(evaluation.params.items()), evaluation.loss) for evaluation in complete)
    if len(complete) < _MIN_COMPLETE or len({evaluation.loss for evaluation in complete}) < 2:
        return []
    return list(_compute_cached(known, tuple(described.items())))


@lru_cache(maxsize=1)  # At the end of a run, the summary and the report need the same importances.
def _compute_cached(
    known: tuple[_KnownLoss, ...], described: tuple[tuple[str, str], ...]
) -> Sequence[Importance]:
    space = read_space(dict(described))
    complete = [dict(params) for params, _ in known]
    genes, existing = compute_genes(complete, space)
    chosen = _choose_spread(GeneEncoding(space).encode_points(genes, existing))
    losses = np.array([loss for _, loss in known])[chosen]
    shares = _draw_shares(space, genes[chosen], existing[chosen], losses)
    means, (low, high) = shares.mean(axis=0), np.quantile(shares, _INTERVAL, axis=0)
    total = means.sum() or 1.0
    found = [
        Importance(name, float(means[index] / total), float(low[index]), float(high[index]))
        for index, name in enumerate(space.parameters)
    ]
    return sorted(found, key=lambda importance: -importance.share)


def _draw_shares(
    space: SearchSpace, genes: Vector, existing: npt.NDArray[np.bool_], losses: Vector
) -> Vector:
    """Draw the shares of the parameters in the variance of the loss, shape `(draws, parameters)`."""
    parameters = space.parameters.values()
    effects = [
        _make_effect(*column) for column in zip(parameters, genes.T, existing.T, strict=True)
    ]
    overlap, (values, log_odds) = _estimate_overlap(space), _transform(losses)
    # The matrices are small, so threads would only wait for each other.
    with threadpool_limits(1, user_api="blas"):
        chains = [
            AnovaSampler(effects, overlap, values, log_odds, np.random.default_rng(seed))
            for seed in range(_CHAINS)
        ]
        variances = np.concatenate([chain.sample(_BURN_IN, _DRAWS) for chain in chains])
    totals = variances.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.divide(
        variances, totals, out=np.zeros_like(variances), where=totals > 0
    )
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
    values = np.array([distances, *(np.log(distances + offset) for offset in _OFFSETS)])
    deviations = values.std(axis=1)
    jacobians = np.array([0.0, *(-np.log(distances + offset).sum() for offset in _OFFSETS)])
    jacobians -= len(losses) * np.log(deviations)
    jacobians[0] += _IDENTITY_LOG_ODDS
    return (values - values.mean(axis=1, keepdims=True)) / deviations[:, None], jacobians


def _make_effect(parameter: Parameter, genes: Vector, existing: npt.NDArray[np.bool_]) -> Effect:
    """Return the effect of a parameter at the points of a sample. Choices that do not occur in it are left out."""
    low, high = parameter.limits
    if isinstance(parameter, Categorical):
        seen = np.unique(genes[existing])
        effect = Effect.from_category(np.searchsorted(seen, genes).astype(float), len(seen))
    elif parameter.is_continuous:
        effect = Effect.from_number((genes - low) / (high - low), math.inf)
    else:
        effect = Effect.from_number((genes - low + 0.5) / (high - low + 1), high - low + 1)
    return Effect(effect.functions * existing[:, None], effect.variances)


def _estimate_overlap(space: SearchSpace) -> Vector:
    """Return for each pair of parameters the share of the search space in which they can have a common effect.

    Both must be active. The share is 0 if one parameter depends on the other by its condition.
    """
    names, rng = list(space.parameters), Random(0)
    drawn = [
        [name in params for name in names]
        for params in (space.draw(rng) for _ in range(_SPACE_SAMPLES))
    ]
    existing = np.array(drawn, float)
    overlap: Vector = existing.T @ existing / len(existing)
    # All parameters on which a parameter depends, directly or not.
    before: dict[str, set[str]] = {}
    for name in names:
        before[name] = set(space.conditions[name]).union(
            *(before[parent] for parent in space.conditions[name])
        )
        for parent in before[name]:
            row, column = names.index(name), names.index(parent)
            overlap[row, column] = overlap[column, row] = 0.0
    return overlap


def _choose_spread(points: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of the points for the model: all or, if there are too many, points far from each other."""
    if len(points) <= _MAX_EVALUATIONS:
        return np.arange(len(points))
    chosen, distances = [0], np.full(len(points), np.inf)
    while len(chosen) < _MAX_EVALUATIONS:
        distances = np.minimum(distances, np.square(points - points[chosen[-1]]).sum(axis=1))
        chosen.append(int(distances.argmax()))
    return np.sort(chosen)
