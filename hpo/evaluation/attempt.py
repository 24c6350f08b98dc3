"""The state of an evaluation on one of its worker's ranks: its losses so far, and the weights of the lowest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpo.evaluation.verdict import GOING, Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.evaluation.worker import Offered
    from hpo.store.record import Assignment


class Attempt:
    """The state of an evaluation; `loss` is the lowest of its `epochs` losses so far, with its `metrics`.

    `began` is when the evaluation began, on this process's clock, plus the time in which its losses were recorded.
    `offered` are the weights that the objective has offered for its next loss, or a function that gathers them, and
    `weights` a copy of those with the lowest loss, if they are to be kept.
    """

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.began = clock.now()
        self.verdict: Verdict = GOING
        self.epochs = 0
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}
        self.offered: Offered | None = None
        self.weights: dict[str, Tensor] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to take."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """The seconds for which the evaluation has gone on."""
        return clock.now() - self.began

    @property
    def was_broken_off(self) -> bool:
        """Whether the evaluation has ended without a result, and ranks may be anywhere in the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def offer(self, weights: Offered) -> None:
        """Remember the weights that the next loss belongs to, or what gathers them."""
        self.offered = weights

    def take(self, verdict: Verdict) -> None:
        """Take over the verdict of all ranks."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.epochs += 1
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.weights = verdict.loss, verdict.metrics, None
