"""Rank the individuals at a rung, by the loss, or by dominance if there are several objectives.

A rung is a step at which individuals are compared. Individuals are added and removed one at a time.
The cost of such an update hardly depends on the number of individuals.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Union

import numpy as np
import numpy.typing as npt

from hpo.dominance import Costs

# One addition moves one individual behind the best, and two removals at once are rare.
_BEHIND_LIMIT = 16


class LossRanking:
    """Rank individuals by the loss; lower is better. The earlier first trial ranks before equals.

    The first trial of an individual identifies it. Individuals in `candidates` are paused.
    Individuals in `stopped` never continue. All others have continued. All three kinds are ranked
    together. `stopped` matters only with several objectives: see `DominanceRanking`.
    """

    def __init__(self, entries: Iterable[tuple[float, int]] = ()) -> None:
        self.entries = sorted(entries)
        self._losses = {root: loss for loss, root in self.entries}

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, root: int, costs: tuple[float, ...]) -> None:
        """Add an individual. The first of its costs is the loss."""
        insort(self.entries, (costs[0], root))
        self._losses[root] = costs[0]

    def remove(self, root: int) -> None:
        """Remove an individual."""
        del self.entries[self._count_ahead(root)]
        del self._losses[root]

    def is_behind(self, root: int, count: int) -> bool:
        """Return whether at least `count` rank before this one, whatever is added later."""
        return self._count_ahead(root) >= count

    def is_best(self, root: int, count: int, *_: object) -> bool:
        """Return whether an individual is among the best `count`, as if it were a candidate."""
        return self._count_ahead(root) < count

    def select_best(self, count: int, candidates: Collection[int], *_: object) -> list[int]:
        """Return the `candidates` among the best `count` of all individuals, best first."""
        return [root for _, root in self.entries[:count] if root in candidates]

    def find_next(self, candidates: Collection[int], *_: object) -> tuple[int, int] | None:
        """Return how many individuals rank before the best candidate, and its first trial."""
        for index, (_loss, root) in enumerate(self.entries):
            if root in candidates:
                return index, root
        return None

    def find_behind(self, count: int) -> list[int]:
        """Return some of the individuals behind the best `count`; possibly none."""
        return [root for _, root in self.entries[count : count + _BEHIND_LIMIT]]

    def restrict_to(self, roots: Collection[int]) -> LossRanking:
        """Return a new ranking with only the individuals in `roots`."""
        return LossRanking(entry for entry in self.entries if entry[1] in roots)

    def _count_ahead(self, root: int) -> int:
        return bisect_left(self.entries, (self._losses[root], root))


@dataclass
class _Layer:
    """Hold individuals that do not dominate each other.

    Their `costs` have the shape (individuals, objectives).
    """

    roots: list[int]
    costs: Costs

    def split(self, taken: Sequence[bool]) -> tuple[_Layer, _Layer]:
        """Return two layers: the individuals that stay, and those that are `taken`."""
        mask = np.array(taken, bool)
        removed = list(compress(self.roots, mask))
        kept = list(compress(self.roots, ~mask))
        return _Layer(kept, self.costs[~mask]), _Layer(removed, self.costs[mask])

    def merge(self, other: _Layer) -> _Layer:
        return _Layer([*self.roots, *other.roots], np.vstack([self.costs, other.costs]))

    def dominates(self, costs: Costs) -> npt.NDArray[np.bool_]:
        """Return for each row of costs whether an individual of this layer dominates it."""
        own = self.costs[:, None]
        found: npt.NDArray[np.bool_] = ((own <= costs).all(axis=2) & (own < costs).any(axis=2)).any(
            axis=0
        )
        return found

    def split_candidates(
        self, candidates: Collection[int], stopped: Collection[int]
    ) -> tuple[_Layer, _Layer]:
        others, waiting = self.split([root in candidates for root in self.roots])
        continued, _ = others.split([root in stopped for root in others.roots])
        return waiting, continued

    def select_best(
        self, count: int, candidates: Collection[int], stopped: Collection[int]
    ) -> list[int]:
        """Return the candidates among the best `count`; those that continued come first."""
        waiting, continued = self.split_candidates(candidates, stopped)
        if count >= len(self.roots):
            return [root for _, root in waiting.entries]
        return _select_farthest(waiting, continued.costs, count - len(continued.roots))

    @property
    def entries(self) -> list[tuple[float, int]]:
        return sorted(zip(self.costs[:, 0].tolist(), self.roots, strict=True))


class DominanceRanking:
    """Rank individuals by non-dominated sorting: the Pareto front first, then the next layers.

    The methods are those of `LossRanking`. The next layer is the front of the remaining
    individuals, and so on. If only a part of a layer is among the best `count`, individuals that
    have been trained further come first. Then candidates are selected one by one, each as far as
    possible from the selected ones (Schmucker et al., "Multi-objective asynchronous successive
    halving", 2021). Individuals in `stopped` come last. An addition moves only the individuals that
    it displaces (Li et al., "Efficient nondomination level update method for steady-state
    evolutionary multiobjective optimization", 2017).
    """

    def __init__(self) -> None:
        self._layers: list[_Layer] = []
        self._costs: dict[int, tuple[float, ...]] = {}

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def entries(self) -> list[tuple[float, int]]:
        """Loss and first trial of each individual as pairs, by layer and then by loss."""
        return [entry for layer in self._layers for entry in layer.entries]

    def add(self, root: int, costs: tuple[float, ...]) -> None:
        """Add an individual to its layer.

        The individuals of this layer that it dominates move to the next layer. There, they displace
        the individuals that they dominate in the same way.
        """
        self._costs[root] = costs
        moved = _Layer([root], np.array([costs]))
        index = self._find_layer(costs)
        while index < len(self._layers):
            layer = self._layers[index]
            kept, dominated = layer.split(moved.dominates(layer.costs).tolist())
            if not kept.roots:
                break  # The whole layer moves, and so do all layers behind it.
            self._layers[index] = kept.merge(moved)
            if not dominated.roots:
                return
            moved = dominated
            index += 1
        self._layers.insert(index, moved)

    def remove(self, root: int) -> None:
        """Remove an individual from its layer.

        Individuals of the next layer move up if no individual of this layer dominates them any
        more. Then the next layer is filled in the same way.
        """
        index = self._find_layer(self._costs.pop(root))
        layer, _ = self._layers[index].split(
            [member == root for member in self._layers[index].roots]
        )
        while layer.roots and index + 1 < len(self._layers):
            behind = self._layers[index + 1]
            left, risen = behind.split((~layer.dominates(behind.costs)).tolist())
            self._layers[index] = layer.merge(risen)
            if not risen.roots:
                return
            layer = left
            index += 1
        self._layers[index : index + 1] = [layer] if layer.roots else []

    def is_behind(self, root: int, count: int) -> bool:
        """Return whether at least `count` individuals dominate this one.

        Other individuals that rank before this one do not count, because additions may move them
        behind it.
        """
        costs = np.vstack([layer.costs for layer in self._layers])
        own = np.array(self._costs[root])
        return int(((costs <= own).all(axis=1) & (costs < own).any(axis=1)).sum()) >= count

    def is_best(
        self, root: int, count: int, candidates: Collection[int], stopped: Collection[int]
    ) -> bool:
        """Return whether an individual is among the best `count`, as if it were a candidate."""
        index = self._find_layer(self._costs[root])
        count -= sum(len(layer.roots) for layer in self._layers[:index])
        layer = self._layers[index]
        if count <= 0 or count >= len(layer.roots):
            return count > 0
        waiting = {root, *(member for member in layer.roots if member in candidates)}
        return root in layer.select_best(count, waiting, stopped)

    def select_best(
        self, count: int, candidates: Collection[int], stopped: Collection[int]
    ) -> list[int]:
        """Return the `candidates` among the best `count` of all individuals, best first."""
        found: list[int] = []
        for layer in self._layers:
            if count <= 0:
                break
            if any(root in candidates for root in layer.roots):
                found += layer.select_best(count, candidates, stopped)
            count -= len(layer.roots)
        return found

    def find_next(
        self, candidates: Collection[int], stopped: Collection[int]
    ) -> tuple[int, int] | None:
        """Return how many individuals rank before the best candidate, and its first trial."""
        ahead = 0
        for layer in self._layers:
            waiting, continued = layer.split_candidates(candidates, stopped)
            if waiting.roots:
                best = _select_farthest(waiting, continued.costs, 1)[0]
                return ahead + len(continued.roots), best
            ahead += len(layer.roots)
        return None

    def find_behind(self, _count: int) -> list[int]:
        """Return no individuals."""
        # To find them, each addition would have to compare all individuals with each other.
        return []

    def restrict_to(self, roots: Collection[int]) -> DominanceRanking:
        """Return a new ranking with only the individuals in `roots`."""
        some = DominanceRanking()
        for root, costs in self._costs.items():
            if root in roots:
                some.add(root, costs)
        return some

    def _find_layer(self, costs: tuple[float, ...]) -> int:
        """Return the index of the first layer in which no individual dominates these costs."""
        row = np.array([costs])
        return bisect_left(self._layers, True, key=lambda layer: not layer.dominates(row)[0])


def _select_farthest(layer: _Layer, taken: Costs, count: int) -> list[int]:
    """Return `count` individuals of a layer, each as far as possible from those before.

    `taken` are the costs of individuals that count as selected at the start. Distances are relative
    to the range of each objective. If no individual has been selected, the lowest loss comes first.
    """
    order = np.lexsort((np.array(layer.roots), layer.costs[:, 0]))
    roots = [layer.roots[index] for index in order]
    costs = layer.costs[order]
    if count >= len(roots) or not np.isfinite(costs).all():
        return roots[: max(0, count)]
    halves = np.vstack([costs, taken]) / 2  # The difference of two floats may overflow.
    spans = np.ptp(halves, axis=0)
    units = halves / np.where(spans > 0, spans, 1.0)
    left = units[: len(roots)]
    found = []
    apart = np.full(len(roots), np.inf)
    for point in units[len(roots) :]:
        apart = np.minimum(apart, ((left - point) ** 2).sum(axis=1))
    for _ in range(count):
        index = int(apart.argmax())
        found.append(roots[index])
        apart = np.minimum(apart, ((left - left[index]) ** 2).sum(axis=1))
        apart[index] = -np.inf
    return found


Ranking = Union[LossRanking, DominanceRanking]


def make_ranking(objectives: int) -> Ranking:
    """Return an empty ranking for this number of objectives."""
    return DominanceRanking() if objectives > 1 else LossRanking()
