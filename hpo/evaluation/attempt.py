"""The state of an evaluation on one of its worker's ranks: its losses so far, and the weights of the lowest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpo.evaluation.verdict import GOING, Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.store.record import Assignment


class Attempt:
    """The state of an evaluation; `loss` is the lowest of its `epochs` losses so far, with its `metrics`.

    `began` is when the evaluation began, on this process's clock, plus the time in which its losses were recorded.
    `offered` are the weights that the objective has offered for its next loss, and `weights` a copy of those with the
    lowest loss, if they are to be kept.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.began = clock.now()
        self.verdict: Verdict = GOING
        self.epochs = 0
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}
        self.offered: Mapping[str, Tensor] | None = None
        self.weights: dict[str, Tensor] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to take."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """The seconds for which the evaluation has gone on."""
        return clock.now() - self.began

    def offer(self, weights: Mapping[str, Tensor]) -> None:
        """Remember the weights that the next loss belongs to."""
        self.offered = weights

    def take(self, verdict: Verdict) -> None:
        """Take over the verdict of all ranks."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.epochs += 1
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.weights = verdict.loss, verdict.metrics, None
