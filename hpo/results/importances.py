"""How much each hyperparameter matters for the loss, over the whole search space.

A search evaluates mostly where losses are low, and hyperparameters that do not matter are inherited along. So
importances are those of a model over the whole space, and not those of the sample.
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

from hpo.breeding.gaussian_process import Vector
from hpo.parameters import Categorical, Parameter
from hpo.results.anova import AnovaSampler, Effect
from hpo.results.genes import compute_genes, make_cube, read_space, select_complete
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

_MIN_COMPLETE = 20  # complete evaluations
_MAX_EVALUATIONS = 128  # evaluations that the model learns from; the time grows with the cube
_CHAINS, _BURN_IN, _DRAWS = 3, 12, 16  # of the sampler; draws of each chain
_INTERVAL = (0.05, 0.95)
_OFFSETS = (0.1, 0.3, 1.0, 3.0, 10.0)  # of logarithms, see `_transform`
_IDENTITY_LOG_ODDS = (
    20.0  # log odds of losses as they are: the sampler hardly leaves a transformation once effects suit it
)
_MAX_DISTANCE = 1e100  # distance of a loss from the lowest one
_SPACE_SAMPLES = 500  # points of the space, to estimate how often conditional parameters exist

_KnownLoss = tuple[tuple[tuple[str, Any], ...], float]  # hyperparameters and their loss


@dataclass(frozen=True)
class Importance:
    """The importance of one hyperparameter."""

    name: str
    """The hyperparameter."""
    share: float
    """The share of the variance of the loss over the search space, from 0 to 1; all of a run add up to 1."""
    low: float
    """The lower end of an interval that has the share with a probability of 90%; 0 if the share may be 0."""
    high: float
    """The upper end of this interval."""

    @property
    def is_significant(self) -> bool:
        """Whether the evaluations tell this hyperparameter apart from one that has no influence."""
        return self.low > 0


def compute_importances(evaluations: Sequence[Evaluation], described: Mapping[str, str]) -> list[Importance]:
    """Return the importance of each hyperparameter, the most important first; nothing if too little is known.

    `described` has a text for each parameter, as run.json has it. Constraints of the space are not considered.
    Evaluations that inherit are left out: their losses do not follow from their hyperparameters alone.

    Raises ValueError if a text describes no parameter, or a value is not one of its parameter.
    """
    complete = select_complete(evaluations)
    known = tuple((tuple(one.params.items()), one.loss) for one in complete)
    if len(complete) < _MIN_COMPLETE or len({one.loss for one in complete}) < 2:
        return []
    return list(_compute_cached(known, tuple(described.items())))


@lru_cache(maxsize=1)  # the summary and the report at the end of a run ask for the same importances
def _compute_cached(known: tuple[_KnownLoss, ...], described: tuple[tuple[str, str], ...]) -> Sequence[Importance]:
    space = read_space(dict(described))
    complete = [dict(params) for params, _ in known]
    genes, existing = compute_genes(complete, space)
    chosen = _choose_spread(make_cube(space).encode_points(genes, existing))
    losses = np.array([loss for _, loss in known])[chosen]
    shares = _draw_shares(space, genes[chosen], existing[chosen], losses)
    means, (low, high) = shares.mean(axis=0), np.quantile(shares, _INTERVAL, axis=0)
    total = means.sum() or 1.0
    found = [
        Importance(name, float(means[index] / total), float(low[index]), float(high[index]))
        for index, name in enumerate(space.parameters)
    ]
    return sorted(found, key=lambda one: -one.share)


def _draw_shares(space: SearchSpace, genes: Vector, existing: npt.NDArray[np.bool_], losses: Vector) -> Vector:
    """Return the shares of parameters in some draws from the posterior, shape (draws, parameters)."""
    parameters = space.parameters.values()
    effects = [_make_effect(*each) for each in zip(parameters, genes.T, existing.T, strict=True)]
    together, (values, odds) = _estimate_overlap(space), _transform(losses)
    # The matrices are small: threads would wait for each other.
    with threadpool_limits(1, user_api="blas"):
        chains = [AnovaSampler(effects, together, values, odds, np.random.default_rng(seed)) for seed in range(_CHAINS)]
        variances = np.concatenate([chain.sample(_BURN_IN, _DRAWS) for chain in chains])
    totals = variances.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.divide(variances, totals, out=np.zeros_like(variances), where=totals > 0)
    return shares


def _transform(losses: Vector) -> tuple[Vector, Vector]:
    """Return losses and their logarithms, shape (transformations, losses), each with the mean 0 and the variance 1.

    The model finds out which one is a sum of effects. Logarithms are those of distances from the lowest loss plus an
    offset, in units of the median distance. The second array says how likely each is: the
    logarithm of the determinant of its Jacobian, and more for the losses as they are.
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
    """Return the effect of a parameter at the points of a sample; choices that no point has are left out."""
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
    """Return the share of the space in which two parameters exist; 0 if one exists only for values of the other."""
    names, rng = list(space.parameters), Random(0)
    drawn = [[name in params for name in names] for params in (space.draw(rng) for _ in range(_SPACE_SAMPLES))]
    existing = np.array(drawn, float)
    together: Vector = existing.T @ existing / len(existing)
    before: dict[str, set[str]] = {}
    for name in names:
        before[name] = set(space.conditions[name]).union(*(before[other] for other in space.conditions[name]))
        for other in before[name]:
            one, two = names.index(name), names.index(other)
            together[one, two] = together[two, one] = 0.0
    return together


def _choose_spread(points: Vector) -> npt.NDArray[np.int64]:
    """Return the indices of the points that are learned from: all, or those that are farthest from each other."""
    if len(points) <= _MAX_EVALUATIONS:
        return np.arange(len(points))
    chosen, distances = [0], np.full(len(points), np.inf)
    while len(chosen) < _MAX_EVALUATIONS:
        distances = np.minimum(distances, np.square(points - points[chosen[-1]]).sum(axis=1))
        chosen.append(int(distances.argmax()))
    return np.sort(chosen)
