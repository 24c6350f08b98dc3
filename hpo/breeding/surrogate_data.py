"""Store evaluations as rows of arrays, from which surrogates learn."""

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

    The context of an evaluation is numbers that were known before it began, such as the loss of its parent.
    """

    genes: Vector
    """The genes of ended evaluations, shape `(evaluations, genes)`."""
    costs: Vector
    """The costs of ended evaluations, shape `(evaluations, objectives)`. They are infinite if the evaluation failed."""
    running: Vector
    """The genes of pending evaluations, shape `(pending, genes)`."""
    contexts: Vector
    """The contexts of ended evaluations, shape `(evaluations, context values)`."""
    running_contexts: Vector
    """The contexts of pending evaluations, shape `(pending, context values)`."""
    seconds: Vector
    """The duration of ended evaluations, shape `(evaluations,)`. NaN if it is unknown or the evaluation was pruned."""
    context: Vector
    """The context of the next evaluation, shape `(context values,)`."""

    @property
    def succeeded(self) -> npt.NDArray[np.bool_]:
        """Whether each of the ended evaluations has all its costs, shape `(evaluations,)`."""
        return np.isfinite(self.costs).all(axis=1)


class EvaluationRows:
    """Evaluations as rows of genes, costs and contexts, in the order in which they ended.

    Args:
        costs: The number of objectives.
        contexts: The number of context values.

    Attributes:
        count: The number of evaluations that have ended.
    """

    def __init__(self, genes: int, costs: int, contexts: int = 0) -> None:
        self.count = 0
        self._arrays = [np.empty((64, width)) for width in (genes, costs, contexts, 1)]
        self._running: dict[int, tuple[Vector, Vector]] = {}
        self._repeatable_rows: dict[int, int] = {}  # The rows of paused and failed evaluations, by trial.
        self._widths = (genes, contexts)

    @property
    def genes(self) -> Vector:
        """The genes of the evaluations that have ended, shape `(evaluations, genes)`."""
        return self._arrays[0][: self.count]

    @property
    def costs(self) -> Vector:
        """The costs of the evaluations that have ended, shape `(evaluations, objectives)`."""
        return self._arrays[1][: self.count]

    @property
    def contexts(self) -> Vector:
        """The contexts of the evaluations that have ended, shape `(evaluations, context values)`."""
        return self._arrays[2][: self.count]

    @property
    def seconds(self) -> Vector:
        """The durations of the evaluations that have ended, shape `(evaluations,)`."""
        return self._arrays[3][: self.count, 0]

    @property
    def running(self) -> tuple[Vector, Vector]:
        """The genes and the contexts of pending evaluations, one row for each."""
        pairs, (genes, contexts) = list(self._running.values()), self._widths
        return (
            np.array([own for own, _ in pairs]).reshape(len(pairs), genes),
            np.array([context for _, context in pairs]).reshape(len(pairs), contexts),
        )

    def add_running(self, trial: int, genes: Vector, context: Vector) -> None:
        """Add a pending evaluation."""
        self._running[trial] = genes, context

    def remove_running(self, trial: int) -> None:
        """Remove a pending evaluation, if there is one with this trial number."""
        self._running.pop(trial, None)

    def add_ended(self, evaluation: Evaluation, *parts: Vector) -> None:
        """Add an evaluation that has ended.

        If it was promoted from a paused evaluation (which was then trained further), it replaces that evaluation.

        Args:
            *parts: Its genes, its costs, its context and its duration.
        """
        row = None if evaluation.retry_of is None else self._repeatable_rows.pop(evaluation.retry_of, None)
        if row is None:
            row = self.count
            self.count += 1
        if row == len(self._arrays[0]):
            self._arrays = [np.concatenate([array, np.empty_like(array)]) for array in self._arrays]
        for array, part in zip(self._arrays, parts, strict=True):
            array[row] = part
        if evaluation.state in ("paused", "failed"):
            self._repeatable_rows[evaluation.trial] = row

    def remove_ended(self, trial: int) -> None:
        """Remove a failed evaluation that no longer counts, if there is one with this trial number."""
        row = self._repeatable_rows.pop(trial, None)
        if row is None:
            return
        for array in self._arrays:
            array[row : self.count - 1] = array[row + 1 : self.count]
        self.count -= 1
        self._repeatable_rows = {known: at - (at > row) for known, at in self._repeatable_rows.items()}
