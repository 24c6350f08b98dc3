"""An evaluation as the supervisor of one of its worker's ranks knows it: its losses so far, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hpo.evaluation.verdict import GOING, Step, Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.drafts import Drafts
    from hpo.store.evaluations import Assignment
    from hpo.store.states import About


class Copies(Protocol):
    """What holds the last state of an evaluation, and the weights of its lowest loss: a trainer, or drafts."""

    def write_state(self, path: str) -> Mapping[str, Any]:
        """Write the state; return after how many ``losses``, the ``seconds`` that it took, and an ``error``, if any."""

    def write_weights(self, path: str, about: Mapping[str, str]) -> str:
        """Write the weights with texts about them; return an error, or an empty text."""


class Attempt:
    """An evaluation as it goes on; `loss` is the lowest of its `losses` so far, with its `metrics`.

    `began` is when the evaluation began, on this process's clock, plus the time in which its losses were recorded.
    ``step`` is this rank's last one. ``has_weights`` says that the leader's trainer has a copy of the weights of the
    lowest loss, and ``copied_after`` after how many losses it has copied the state that it has not written yet; 0 is
    none.

    `restored` is what is known of the state of an evaluation that was interrupted, and which goes on if the objective
    asks for it: it then has its losses, too. `inherited` is that of the individual it comes from, if it begins with
    that, and ``has_inherited`` says whether the objective has asked for it. `path` is the file of either. `earlier` are
    the seconds that the evaluation took in earlier sessions, where it has a loss of this one already; they are known
    once it goes on from there.
    """

    def __init__(
        self,
        assignment: Assignment,
        restored: About | None = None,
        inherited: About | None = None,
        path: Path | None = None,
        earlier: float | None = None,
    ) -> None:
        self.assignment = assignment
        self.is_first = earlier is None
        self.earlier = earlier or 0.0
        self.restored = restored
        self.inherited = inherited
        self.path = path
        self.has_inherited = False
        self.losses: list[float] = []
        self.taken_over = 0  # losses of the evaluation that was interrupted
        self.seconds_before = 0.0  # which those took
        self.step: Step | None = None
        self.copied_after = 0
        self.has_weights = False
        self.saves_itself = False  # a program, so that it can be paused
        self.drafts: Drafts | None = None  # of a program, on the leader
        self.began = clock.now()
        self.verdict: Verdict = GOING
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to take."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """The seconds for which the evaluation has gone on."""
        return clock.now() - self.began

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss of its own."""
        return len(self.losses) > self.taken_over

    @property
    def has_been_given(self) -> bool:
        """Whether it has begun from a state, without a loss of its own yet; the same on all ranks."""
        return self.restored is not None or (self.inherited is not None and self.verdict.inherited)

    @property
    def offers(self) -> bool:
        """Whether the objective has offered weights with its last step, on this rank."""
        return self.step is not None and self.step.offers

    @property
    def has_saved(self) -> bool:
        """Whether the objective has saved a state with its last step, on this rank."""
        return self.step is not None and self.step.has_saved

    @property
    def seconds_in_all(self) -> float:
        """The seconds for which it has gone on, also before it was interrupted."""
        return self.seconds + self.seconds_before

    @property
    def was_broken_off(self) -> bool:
        """Whether the evaluation has ended without a result, and ranks may be anywhere in the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def take_step(self, step: Step) -> None:
        """Take in what this rank's objective has done.

        It may have asked for the state that it continues from, or inherits, also if it has failed then.
        """
        self.step = step
        self.has_inherited |= step.inherited
        if step.went_on and self.restored is not None and not self.losses:
            self.continue_from(self.restored.losses, self.restored.seconds, self.restored.metrics)
            self.has_weights = self.restored.has_weights

    def continue_from(self, losses: Sequence[float], seconds: float, metrics: Mapping[str, float]) -> None:
        """Take over the losses that the evaluation had before it was interrupted or paused, and its seconds."""
        self.losses, self.taken_over, self.seconds_before = list(losses), len(losses), seconds
        self.earlier = seconds if self.is_first else self.earlier
        self.loss, self.metrics = min(losses, default=math.inf), metrics

    def take(self, verdict: Verdict) -> None:
        """Take over the verdict of all ranks."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.restored = self.inherited = None  # their files may be replaced from now on
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.has_weights = verdict.loss, verdict.metrics, False
