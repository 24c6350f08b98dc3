"""Compute the hypervolume of a Pareto front: the share of a reference box that the front dominates.

The costs of individuals are described in `hpo.objectives.Objectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpo.dominance import Costs, compute_hypervolume
from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.pareto_front import FrontArchive, compute_costs, find_front

_OUTLIER_FACTOR = 100
_REFERENCE_FACTOR = 1.1
_MAX_FLOAT = np.finfo(float).max


@dataclass(frozen=True)
class ReferenceBox:
    """A box in the space of costs between the ideal point and the reference point of a front.

    In each objective, the reference is a tenth farther from the ideal than the higher of two costs.
    They are the highest cost of the front, and the median cost of all complete evaluations. The
    median is robust even if up to half of all individuals have diverged. An individual of the front
    may have diverged in one objective. Therefore a cost of the front is ignored if it is more than
    100 times as far from the ideal as the median.
    """

    ideal: Costs
    """The lowest cost of the front in each objective, shape `(objectives,)`."""
    reference: Costs
    """The highest cost that contributes to the hypervolume, shape `(objectives,)`."""

    def compute_share(self, costs: Costs) -> float:
        """Return the share of the box, from 0 to 1, that individuals with these costs dominate."""
        return compute_hypervolume(self._normalize(costs), np.ones_like(self.ideal))

    def compute_gain(self, own: Costs, known: Costs) -> float:
        """Return the share of the box that one individual dominates and known individuals do not.

        The method is the exclusive hypervolume (While et al., A fast way of calculating exact
        hypervolumes, 2012). The costs of known individuals are raised to at least `own`. Most of
        the raised costs are dominated by others, and are dropped. So this is much faster than
        computing the whole share. The shape of `own` is `(1, objectives)`.
        """
        corner = self._normalize(own)
        shared = compute_hypervolume(
            np.maximum(self._normalize(known), corner), np.ones_like(self.ideal)
        )
        return float(np.prod(np.clip(1.0 - corner, 0.0, None))) - shared

    def _normalize(self, costs: Costs) -> Costs:
        # Halves, because the difference of two floats may overflow.
        sides = self.reference / 2 - self.ideal / 2
        within: Costs = np.clip((costs / 2 - self.ideal / 2) / sides, 0.0, None)
        return within


def make_box(evaluations: Sequence[Evaluation], objectives: Objectives) -> ReferenceBox | None:
    """Return the reference box of a run; None for one objective, or if it would be empty."""
    best = compute_costs(find_front(evaluations, objectives), objectives)
    if not objectives.is_multi_objective or not len(best):
        return None
    complete = compute_costs([e for e in evaluations if e.state == "complete"], objectives)
    complete = complete[np.isfinite(complete).all(axis=1)]
    ideal = best.min(axis=0)
    with np.errstate(over="ignore"):
        median = np.clip(np.median(complete, axis=0), -_MAX_FLOAT, _MAX_FLOAT)
        far = np.where(median > ideal, ideal + _OUTLIER_FACTOR * (median - ideal), np.inf)
        worst = np.maximum(np.where(best <= far, best, ideal).max(axis=0), median)
        reference = np.clip(ideal + _REFERENCE_FACTOR * (worst - ideal), -_MAX_FLOAT, _MAX_FLOAT)
    return ReferenceBox(ideal, reference) if (worst > ideal).all() else None


@dataclass(frozen=True)
class Hypervolume:
    """The hypervolume of a front, and the corners of the box as values of the objectives."""

    share: float
    """The share of the reference box that the front dominates, from 0 to 1."""
    ideal: list[float]
    reference: list[float]


def summarize_hypervolume(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> Hypervolume | None:
    """Return the hypervolume of the front; None without a box, see `make_box`."""
    box = make_box(evaluations, objectives)
    if box is None:
        return None
    costs = compute_costs(find_front(evaluations, objectives), objectives)
    # The cost of a cost is the value: each maximised objective is negated twice.
    ideal = objectives.compute_costs(box.ideal.tolist())
    reference = objectives.compute_costs(box.reference.tolist())
    return Hypervolume(box.compute_share(np.unique(costs, axis=0)), list(ideal), list(reference))


def compute_shares_over_time(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> list[tuple[int, float]]:
    """Return the number of ended evaluations and the share of the box at each growth of the front.

    Imported evaluations count from the beginning, but not in the number. The result is empty
    without a box, see `make_box`.
    """
    box = make_box(evaluations, objectives)
    if box is None:
        return []
    archive = FrontArchive(objectives, [e for e in evaluations if e.imported_from])
    share = box.compute_share(archive.costs)
    grown = [(0, share)] if archive.front else []
    for count, evaluation in enumerate(sort_by_end(evaluations), start=1):
        known = archive.costs
        own = compute_costs([evaluation], objectives)
        if archive.add(evaluation) and not (known == own).all(axis=1).any():
            share += box.compute_gain(own, known)
            grown.append((count, min(share, 1.0)))
    return grown
