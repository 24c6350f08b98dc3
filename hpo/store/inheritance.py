"""Inheritance: from whom an individual can take over what it has learned, and from whom it has come.

Population based training (Jaderberg et al. 2017), asynchronous and on islands: an individual that differs from one of
the best of its island in mutable parameters alone goes on with what that has learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

PARENTS_PER_ISLAND = 10  # of the best of each island, from which `ga` breeds, too


def rank_heritable(evaluations: Sequence[Evaluation], island: int, islands: int) -> list[Evaluation]:
    """Return the complete evaluations of an island that have saved what can be inherited, the best first."""
    own = [one for one in evaluations if one.island % islands == island and can_be_inherited(one)]
    return sorted(own, key=lambda one: (one.loss, one.trial))


def select_parents(evaluations: Sequence[Evaluation], island: int, islands: int) -> list[Evaluation]:
    """Return the evaluations of an island that individuals may inherit from, the best first."""
    return rank_heritable(evaluations, island, islands)[:PARENTS_PER_ISLAND]


def can_be_inherited(one: Evaluation) -> bool:
    """Tell whether an evaluation has kept what it has learned."""
    return (
        one.state == "complete"
        and not one.imported_from
        and one.checkpoint_step > 0
        and one.checkpoint_step == len(one.curve)
    )


def find_parent(params: Mapping[str, Any], best: Sequence[Evaluation], space: SearchSpace) -> Evaluation | None:
    """Return the first of the best that differs in mutable parameters alone; None where there is none."""
    fixed = space.immutable_names
    return next((one for one in best if all(one.params.get(name) == params.get(name) for name in fixed)), None)


def find_superseded(evaluations: Sequence[Evaluation], island: int, islands: int) -> list[Evaluation]:
    """Return the first evaluations behind the best of an island, but for those that somebody inherits from now."""
    used = {one.inherits for one in evaluations if one.state in ("running", "waiting")}
    return [
        one
        for one in rank_heritable(evaluations, island, islands)[PARENTS_PER_ISLAND : 2 * PARENTS_PER_ISLAND]
        if one.trial not in used
    ]


def has_inheritance(evaluations: Iterable[Evaluation]) -> bool:
    """Return whether any evaluation inherits: its loss is then not that of its hyperparameters alone."""
    return any(one.inherits is not None for one in evaluations)


def find_trials_to_keep(evaluations: Sequence[Evaluation], islands: int) -> list[int]:
    """Return the trials that may be inherited from, or that one which waits inherits from."""
    best = [one.trial for island in range(islands) for one in select_parents(evaluations, island, islands)]
    return best + [one.inherits for one in evaluations if one.state == "waiting" and one.inherits is not None]


def trace_lineage(one: Evaluation, evaluations: Mapping[int, Evaluation]) -> list[Evaluation]:
    """Return from whom an evaluation has come, the first of them first, and itself at the end."""
    line = [one]
    while (parent := evaluations.get(-1 if line[0].inherits is None else line[0].inherits)) is not None:
        line.insert(0, parent)
    return line
