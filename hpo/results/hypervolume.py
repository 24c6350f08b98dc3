"""How much a front is worth: the share of a box that it dominates, at the end and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpo.dominance import Costs, compute_hypervolume
from hpo.objectives import Objectives
from hpo.results.search_history import sort_by_end
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import FrontArchive, compute_costs, find_front

_OUTLIER_FACTOR = 100
_REFERENCE_FACTOR = 1.1
_MAX_FLOAT = np.finfo(float).max


@dataclass(frozen=True)
class ReferenceBox:
    """What lies between the best values of a front, its `ideal`, and its `reference`, both costs, shape (objectives,).

    The reference is a tenth further from the ideal than the worst of the front and the median of all that is complete:
    up to half of all individuals may have diverged. So may some of the front, which are good at something else: who is
    more than 100 times as far from the ideal as the median is does not count.
    """

    ideal: Costs
    reference: Costs

    def compute_share(self, costs: Costs) -> float:
        """Return the share of the box, from 0 to 1, that these individuals dominate."""
        return compute_hypervolume(self._normalize(costs), np.ones(len(self.ideal)))

    def compute_gain(self, own: Costs, known: Costs) -> float:
        """Return the share of the box that one individual dominates, shape (1, objectives), and known ones do not.

        It is its own share without what they dominate of it (While et al., A fast way of calculating exact
        hypervolumes, 2012), which costs far less than the whole share: few of them tell where it ends.
        """
        corner = self._normalize(own)
        inside = np.maximum(self._normalize(known), corner)
        return float(np.prod(np.clip(1.0 - corner, 0.0, None))) - compute_hypervolume(inside, np.ones(len(self.ideal)))

    def _normalize(self, costs: Costs) -> Costs:
        """Return costs where the box is that from 0 to 1."""
        sides = self.reference / 2 - self.ideal / 2  # halves: the difference of two floats may overflow
        within: Costs = np.clip((costs / 2 - self.ideal / 2) / sides, 0.0, None)
        return within


def make_box(evaluations: Sequence[Evaluation], objectives: Objectives) -> ReferenceBox | None:
    """Return the box of a run; None where there is no trade between objectives yet."""
    best = compute_costs(find_front(evaluations, objectives), objectives)
    if not objectives.is_multi_objective or not len(best):
        return None
    complete = compute_costs([one for one in evaluations if one.state == "complete"], objectives)
    complete = complete[np.isfinite(complete).all(axis=1)]
    ideal = best.min(axis=0)
    with np.errstate(over="ignore"):
        median = np.clip(np.median(complete, axis=0), -_MAX_FLOAT, _MAX_FLOAT)
        far = np.where(median > ideal, ideal + _OUTLIER_FACTOR * (median - ideal), np.inf)
        worst = np.maximum(np.where(best <= far, best, ideal).max(axis=0), median)
        reference = np.clip(ideal + _REFERENCE_FACTOR * (worst - ideal), -_MAX_FLOAT, _MAX_FLOAT)
    return ReferenceBox(ideal, reference) if (worst > ideal).all() else None


def summarize_hypervolume(evaluations: Sequence[Evaluation], objectives: Objectives) -> dict[str, Any] | None:
    """Return the share of the box that the front dominates, with the box's corners as values; None without a box."""
    box = make_box(evaluations, objectives)
    if box is None:
        return None
    share = box.compute_share(np.unique(compute_costs(find_front(evaluations, objectives), objectives), axis=0))
    corners = {"ideal": box.ideal, "reference": box.reference}
    return {"share": share, **{name: list(objectives.compute_costs(costs.tolist())) for name, costs in corners.items()}}


def compute_shares_over_time(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[tuple[int, float]]:
    """Return pairs: after how many of the run's own evaluations the front has grown, and the share of the box then.

    What was taken over is there from the beginning.
    """
    box = make_box(evaluations, objectives)
    if box is None:
        return []
    archive, grown = FrontArchive(objectives, [one for one in evaluations if one.imported_from]), []
    share = box.compute_share(archive.costs)
    if archive.front:
        grown.append((0, share))
    for count, one in enumerate(sort_by_end(evaluations), start=1):
        known, own = archive.costs, compute_costs([one], objectives)
        if archive.add(one) and not (known == own).all(axis=1).any():
            share += box.compute_gain(own, known)
            grown.append((count, min(share, 1.0)))
    return grown
