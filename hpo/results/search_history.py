"""List the evaluations of a search that improved its best result, in the order of their ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.pareto_front import FrontArchive


def find_improvements(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that had the lowest loss of the run when they ended.

    Their losses are also lower than those of all evaluations that were imported before them.
    """
    found, lowest = [], math.inf
    for evaluation in _iterate_by_end(evaluations):
        if evaluation.state == "complete" and evaluation.loss < lowest:
            lowest = evaluation.loss
            found.append(evaluation)
    return [evaluation for evaluation in found if not evaluation.imported_from]


def find_front_additions(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> list[Evaluation]:
    """Return the evaluations that joined the Pareto front when they ended.

    They are compared with earlier evaluations of this run, and with evaluations that were imported
    before them.
    """
    archive = FrontArchive(objectives)
    found = [evaluation for evaluation in _iterate_by_end(evaluations) if archive.add(evaluation)]
    return [evaluation for evaluation in found if not evaluation.imported_from]


def _iterate_by_end(evaluations: Sequence[Evaluation]) -> Iterator[Evaluation]:
    """Yield each imported evaluation before the first ended one with a higher trial number."""
    imported = [evaluation for evaluation in evaluations if evaluation.imported_from]
    pending = deque(sorted(imported, key=lambda evaluation: evaluation.trial))
    for evaluation in sort_by_end(evaluations):
        while pending and pending[0].trial < evaluation.trial:
            yield pending.popleft()
        yield evaluation
