"""List the evaluations of a search in the order in which they ended, and those that improved the best result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.pareto_front import FrontArchive


def find_improvements(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that had the lowest loss of the run when they ended, in the order in which they ended.

    Their losses are also lower than those of all evaluations that were imported before them.
    """
    found, lowest = [], math.inf
    imported = [
        evaluation
        for evaluation in evaluations
        if evaluation.imported_from and evaluation.state == "complete"
    ]
    for evaluation in sort_by_end(evaluations):
        lowest = min(
            [lowest, *(source.loss for source in imported if source.trial < evaluation.trial)]
        )
        if evaluation.state == "complete" and evaluation.loss < lowest:
            lowest = evaluation.loss
            found.append(evaluation)
    return found


def find_front_additions(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> list[Evaluation]:
    """Return the evaluations that joined the Pareto front when they ended, in the order in which they ended.

    They are compared with earlier evaluations of this run, and with evaluations that were imported
    before them.
    """
    archive, found = FrontArchive(objectives), []
    imported = deque(
        sorted(
            (evaluation for evaluation in evaluations if evaluation.imported_from),
            key=lambda evaluation: evaluation.trial,
        )
    )
    for evaluation in sort_by_end(evaluations):
        while imported and imported[0].trial < evaluation.trial:
            archive.add(imported.popleft())
        if archive.add(evaluation):
            found.append(evaluation)
    return found
