"""Decide from which trial's checkpoint a new individual starts.

This is population based training (Jaderberg et al., 2017), asynchronous and on islands. The parent
(the trial whose checkpoint is used) must be one of the best of the island. Parent and individual
may differ only in mutable parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

if TYPE_CHECKING:
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.record import Record

# The best of each island. The propagator `ga` selects parents from the same number.
PARENTS_PER_ISLAND = 10


def rank_heritable(
    evaluations: Sequence[Evaluation], island: int, islands: int
) -> list[Evaluation]:
    """Return the complete evaluations of an island with a final checkpoint, best first."""
    own = [e for e in evaluations if e.island % islands == island and can_be_inherited(e)]
    return sorted(own, key=lambda e: (e.loss, e.trial))


def select_parents(
    evaluations: Sequence[Evaluation], island: int, islands: int
) -> list[Evaluation]:
    """Return the best of an island, best first; individuals may start from their checkpoints."""
    return rank_heritable(evaluations, island, islands)[:PARENTS_PER_ISLAND]


def can_be_inherited(evaluation: Evaluation) -> bool:
    """Return whether an evaluation of this run is complete and has a final checkpoint."""
    return (
        evaluation.state == "complete"
        and not evaluation.imported_from
        and evaluation.checkpoint_step > 0
        and evaluation.checkpoint_step == len(evaluation.curve)
    )


def find_parent(
    params: Mapping[str, Any], best: Sequence[Evaluation], space: SearchSpace
) -> Evaluation | None:
    """Return the first evaluation in `best` with the immutable parameters of `params`."""
    names = space.immutable_names
    return next(
        (e for e in best if all(e.params.get(name) == params.get(name) for name in names)), None
    )


def find_superseded(
    evaluations: Sequence[Evaluation], island: int, islands: int
) -> list[Evaluation]:
    """Return up to `PARENTS_PER_ISLAND` evaluations that rank next behind the parents of an island.

    Their checkpoints are not needed any more. Evaluations from which a running or waiting
    evaluation inherits are left out.
    """
    used = {
        evaluation.inherits
        for evaluation in evaluations
        if evaluation.state in ("running", "waiting")
    }
    return [
        evaluation
        for evaluation in rank_heritable(evaluations, island, islands)[
            PARENTS_PER_ISLAND : 2 * PARENTS_PER_ISLAND
        ]
        if evaluation.trial not in used
    ]


def has_inheritance(evaluations: Iterable[Evaluation]) -> bool:
    """Return whether any loss depends not only on hyperparameters, but on a parent."""
    return any(evaluation.inherits is not None for evaluation in evaluations)


def find_trials_to_keep(evaluations: Sequence[Evaluation], islands: int) -> list[int]:
    """Return the trials with needed checkpoints: possible parents, and those of waiting trials."""
    best = [
        parent.trial
        for island in range(islands)
        for parent in select_parents(evaluations, island, islands)
    ]
    return best + [
        e.inherits for e in evaluations if e.state == "waiting" and e.inherits is not None
    ]


def trace_lineage(
    evaluation: Evaluation, evaluations: Mapping[int, Evaluation]
) -> list[Evaluation]:
    """Return an evaluation with its parent, grandparent and so on, oldest first."""
    lineage = [evaluation]
    while (
        parent := evaluations.get(-1 if lineage[0].inherits is None else lineage[0].inherits)
    ) is not None:
        lineage.insert(0, parent)
    return lineage


@dataclass(frozen=True)
class InheritancePolicy:
    """Select the parent of each new individual: the trial from whose checkpoint it starts.

    Attributes:
        record: Record of the run.
        space: Search space of the run.
        islands: Number of islands.
        checkpoints: Checkpoints of the run.
    """

    record: Record
    space: SearchSpace
    islands: int
    checkpoints: CheckpointStore

    def find_parent(self, params: Mapping[str, Any], island: int) -> int | None:
        """Return the trial from whose checkpoint a new individual of an island starts."""
        best = select_parents(self.record.read_evaluations(), island, self.islands)
        available = [evaluation for evaluation in best if self._has_checkpoint(evaluation.trial)]
        parent = find_parent(params, available, self.space)
        return parent.trial if parent else None

    def _has_checkpoint(self, trial: int) -> bool:
        """Return whether the checkpoint file of a trial exists.

        Users may remove it, and damaged files are removed.
        """
        (root,) = self.record.find_roots([trial])
        return self.checkpoints.get_path(root).exists()

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Return whether `trial` would be a possible parent if it ended with this loss."""
        evaluations = self.record.read_evaluations()
        best = select_parents(evaluations, evaluations[trial].island, self.islands)
        return len(best) < PARENTS_PER_ISLAND or loss < best[-1].loss

    def find_superseded(self, trial: int) -> list[int]:
        """Return the individuals whose checkpoints `trial` makes unnecessary."""
        evaluations = self.record.read_evaluations()
        superseded = find_superseded(evaluations, evaluations[trial].island, self.islands)
        return sorted(self.record.find_roots(evaluation.trial for evaluation in superseded))
