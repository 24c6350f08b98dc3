"""Who inherits from whom in a run, as its record has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.store.lineage import KEPT, disinherited, heritable, parent_of

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.record import Record
    from hpo.store.states import States


@dataclass(frozen=True)
class Heirs:
    """The inheritance of a run on so many `islands`. Individuals inherit `states`."""

    record: Record
    space: SearchSpace
    islands: int
    states: States

    def parent(self, params: Mapping[str, Any], island: int) -> int | None:
        """Return the trial that an individual inherits from; None where there is none."""
        best = heritable(self.record.evaluations(), island, self.islands)
        there = [one for one in best if self._has_state(one.trial)]
        parent = parent_of(params, there, self.space)
        return parent.trial if parent else None

    def _has_state(self, trial: int) -> bool:
        """Return whether the state of a trial is there: a user may have removed it, or it was damaged."""
        (root,) = self.record.roots([trial])
        return self.states.path(root).exists()

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
