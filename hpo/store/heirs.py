"""Who inherits from whom in a run, as its record has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.store.inheritance import PARENTS_PER_ISLAND, find_parent, find_superseded, select_parents

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.record import Record


@dataclass(frozen=True)
class InheritancePolicy:
    """The inheritance of a run on so many `islands`. Individuals inherit `states`."""

    record: Record
    space: SearchSpace
    islands: int
    checkpoints: CheckpointStore

    def find_parent(self, params: Mapping[str, Any], island: int) -> int | None:
        """Return the trial that an individual inherits from; None where there is none."""
        best = select_parents(self.record.read_evaluations(), island, self.islands)
        there = [one for one in best if self._has_checkpoint(one.trial)]
        parent = find_parent(params, there, self.space)
        return parent.trial if parent else None

    def _has_checkpoint(self, trial: int) -> bool:
        """Return whether the state of a trial is there: a user may have removed it, or it was damaged."""
        (root,) = self.record.find_roots([trial])
        return self.checkpoints.get_path(root).exists()

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Tell whether a trial, with this loss, is among the best of its island, from which others inherit."""
        evaluations = self.record.read_evaluations()
        best = select_parents(evaluations, evaluations[trial].island, self.islands)
        return len(best) < PARENTS_PER_ISLAND or loss < best[-1].loss

    def find_superseded(self, trial: int) -> list[int]:
        """Return the first trials of those that are among the best of an island no more, which a trial is on."""
        evaluations = self.record.read_evaluations()
        behind = find_superseded(evaluations, evaluations[trial].island, self.islands)
        return sorted(self.record.find_roots(one.trial for one in behind))
