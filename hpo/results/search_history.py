"""How a search went: its evaluations in the order in which they ended, and which of them were the best by then."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import FrontArchive


def sort_by_end(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the finished evaluations of the run itself, in the order in which they ended."""
    return sorted((one for one in evaluations if one.counts_for_budget), key=lambda one: (one.ended, one.trial))


def find_improvements(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that were the best of the run when they ended, in the order in which they ended.

    They also had to be better than the evaluations that were taken over before them.
    """
    found, lowest = [], math.inf
    taken_over = [
        evaluation for evaluation in evaluations if evaluation.imported_from and evaluation.state == "complete"
    ]
    for evaluation in sort_by_end(evaluations):
        lowest = min([lowest, *(other.loss for other in taken_over if other.trial < evaluation.trial)])
        if evaluation.state == "complete" and evaluation.loss < lowest:
            lowest = evaluation.loss
            found.append(evaluation)
    return found


def find_front_additions(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the evaluations that joined the front of the run when they ended, in the order in which they ended.

    Those that were taken over before them are on the front, too.
    """
    archive, found = FrontArchive(objectives), []
    taken_over = deque(sorted((one for one in evaluations if one.imported_from), key=lambda one: one.trial))
    for one in sort_by_end(evaluations):
        while taken_over and taken_over[0].trial < one.trial:
            archive.add(taken_over.popleft())
        if archive.add(one):
            found.append(one)
    return found
