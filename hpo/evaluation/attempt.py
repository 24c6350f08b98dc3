"""An evaluation as it goes on, on one of its worker's ranks: the losses so far, and the weights that have the best."""

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
    """What has become of an evaluation so far; `loss` is the lowest of `epochs`, with its metrics.

    `began` is when, on this process's clock, without the time in which its losses were written down. `offered` are the
    weights that the objective has offered for its next loss, `weights` those of the lowest that are to be kept.
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
        """For how long it has gone on."""
        return clock.now() - self.began

    def offer(self, weights: Mapping[str, Tensor]) -> None:
        """Take the weights that the next loss is of."""
        self.offered = weights

    def take(self, verdict: Verdict) -> None:
        """Take what all ranks have agreed on."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.epochs += 1
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.weights = verdict.loss, verdict.metrics, None
