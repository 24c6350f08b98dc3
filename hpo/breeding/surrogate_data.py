"""What surrogates learn from: evaluations as rows of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hpo.store.evaluations import Evaluation

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SurrogateSample:
    """Evaluations that a surrogate learns from.

    `genes` and `costs` belong to evaluations that have ended, `running` are the genes of those in flight. Each has a
    row in `contexts` or `running_contexts`: the facts that were known before it began. `context` has the facts of the
    next evaluation.
    """

    genes: Vector
    costs: Vector
    running: Vector
    contexts: Vector
    running_contexts: Vector
    context: Vector


class EvaluationRows:
    """Evaluations as rows of genes, costs and contexts, in the order in which they ended."""

    def __init__(self, genes: int, costs: int, contexts: int = 0) -> None:
        self.count = 0
        self._arrays = [np.empty((64, width)) for width in (genes, costs, contexts)]
        self._running: dict[int, tuple[Vector, Vector]] = {}
        self._paused_rows: dict[int, int] = {}  # The rows of paused evaluations, by trial.
        self._widths = (genes, contexts)

    @property
    def genes(self) -> Vector:
        """The genes of the evaluations that have ended, shape (evaluations, parameters)."""
        return self._arrays[0][: self.count]

    @property
    def costs(self) -> Vector:
        """The costs of the evaluations that have ended, shape (evaluations, objectives)."""
        return self._arrays[1][: self.count]

    @property
    def contexts(self) -> Vector:
        """The contexts of the evaluations that have ended, shape (evaluations, facts)."""
        return self._arrays[2][: self.count]

    @property
    def running(self) -> tuple[Vector, Vector]:
        """The genes and the contexts of the evaluations in flight."""
        pairs, (genes, contexts) = list(self._running.values()), self._widths
        return (
            np.array([own for own, _ in pairs]).reshape(len(pairs), genes),
            np.array([context for _, context in pairs]).reshape(len(pairs), contexts),
        )

    def add_running(self, trial: int, genes: Vector, context: Vector) -> None:
        """Add an evaluation in flight."""
        self._running[trial] = genes, context

    def remove_running(self, trial: int) -> None:
        """Remove an evaluation from those in flight."""
        self._running.pop(trial, None)

    def add_ended(self, evaluation: Evaluation, *parts: Vector) -> None:
        """Add an evaluation that has ended, with its genes, costs and context.

        It replaces the paused evaluation from which it was promoted.
        """
        place = None if evaluation.retry_of is None else self._paused_rows.pop(evaluation.retry_of, None)
        if place is None:
            place = self.count
            self.count += 1
        if place == len(self._arrays[0]):
            self._arrays = [np.concatenate([array, np.empty_like(array)]) for array in self._arrays]
        for array, part in zip(self._arrays, parts, strict=True):
            array[place] = part
        if evaluation.state == "paused":
            self._paused_rows[evaluation.trial] = place
