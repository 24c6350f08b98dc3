"""Who inherits from whom in a run, as its record has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.store.lineage import KEPT, disinherited, heritable, parent_of

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.record import Record


@dataclass(frozen=True)
class Heirs:
    """The inheritance of a run on so many `islands`."""

    record: Record
    space: SearchSpace
    islands: int

    def parent(self, params: Mapping[str, Any], island: int) -> int | None:
        """Return the trial that an individual inherits from; None where there is none."""
        best = heritable(self.record.evaluations(), island, self.islands)
        parent = parent_of(params, best, self.space)
        return parent.trial if parent else None

    def may_leave(self, trial: int, loss: float) -> bool:
        """Tell whether a trial, with this loss, is among the best of its island, from which others inherit."""
        evaluations = self.record.evaluations()
        best = heritable(evaluations, evaluations[trial].island, self.islands)
        return len(best) < KEPT or loss < best[-1].loss

    def superseded(self, trial: int) -> list[int]:
        """Return the first trials of those that are among the best of an island no more, which a trial is on."""
        evaluations = self.record.evaluations()
        behind = disinherited(evaluations, evaluations[trial].island, self.islands)
        return sorted(self.record.roots(one.trial for one in behind))
