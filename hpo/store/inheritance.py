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
    """Return the complete evaluations of an island with a final checkpoint, best first.

    New individuals may start from the checkpoints of the first `PARENTS_PER_ISLAND`.
    """
    own = [e for e in evaluations if e.island % islands == island and can_be_inherited(e)]
    return sorted(own, key=lambda e: (e.loss, e.trial))


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
    used = {e.inherits for e in evaluations if e.state in ("running", "waiting")}
    behind = rank_heritable(evaluations, island, islands)[PARENTS_PER_ISLAND:]
    return [e for e in behind[:PARENTS_PER_ISLAND] if e.trial not in used]


def has_inheritance(evaluations: Iterable[Evaluation]) -> bool:
    """Return whether any loss depends not only on hyperparameters, but on a parent."""
    return any(evaluation.inherits is not None for evaluation in evaluations)


def find_trials_to_keep(evaluations: Sequence[Evaluation], islands: int) -> list[int]:
    """Return the trials with needed checkpoints: possible parents, and those of waiting trials."""
    kept = [e.inherits for e in evaluations if e.state == "waiting" and e.inherits is not None]
    for island in range(islands):
        best = rank_heritable(evaluations, island, islands)[:PARENTS_PER_ISLAND]
        kept += [evaluation.trial for evaluation in best]
    return kept


def trace_lineage(
    evaluation: Evaluation, evaluations: Mapping[int, Evaluation]
) -> list[Evaluation]:
    """Return an evaluation with its parent, grandparent and so on, oldest first."""
    lineage = [evaluation]
    while lineage[0].inherits is not None and lineage[0].inherits in evaluations:
        lineage.insert(0, evaluations[lineage[0].inherits])
    return lineage


@dataclass(frozen=True)
class InheritancePolicy:
    """Select the parent of each new individual: the trial from whose checkpoint it starts."""

    record: Record
    space: SearchSpace
    islands: int
    checkpoints: CheckpointStore

    def find_parent(self, params: Mapping[str, Any], island: int) -> int | None:
        """Return the trial from whose checkpoint a new individual of an island starts."""
        evaluations = self.record.read_evaluations()
        available = []
        for evaluation in rank_heritable(evaluations, island, self.islands)[:PARENTS_PER_ISLAND]:
            # Users may remove checkpoint files, and damaged files are removed.
            (root,) = self.record.find_roots([evaluation.trial])
            if self.checkpoints.get_path(root).exists():
                available.append(evaluation)
        parent = find_parent(params, available, self.space)
        return parent.trial if parent else None

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Return whether `trial` would be a possible parent if it ended with this loss."""
        evaluations = self.record.read_evaluations()
        ranked = rank_heritable(evaluations, evaluations[trial].island, self.islands)
        return len(ranked) < PARENTS_PER_ISLAND or loss < ranked[PARENTS_PER_ISLAND - 1].loss

    def find_superseded(self, trial: int) -> list[int]:
        """Return the individuals whose checkpoints `trial` makes unnecessary."""
        evaluations = self.record.read_evaluations()
        superseded = find_superseded(evaluations, evaluations[trial].island, self.islands)
        return sorted(self.record.find_roots(evaluation.trial for evaluation in superseded))
