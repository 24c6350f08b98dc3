"""An evaluation as the supervisor of one of its worker's ranks knows it: its losses so far, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hpo.evaluation.step_verdict import GOING_VERDICT, Step, Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.draft_store import DraftStore
    from hpo.store.checkpoints import CheckpointInfo
    from hpo.store.evaluations import Assignment


class CopyHolder(Protocol):
    """What holds the last state of an evaluation, and the weights of its lowest loss: a trainer, or drafts."""

    def write_checkpoint(self, path: str) -> Mapping[str, Any]:
        """Write the state; return after how many ``losses``, the ``seconds`` that it took, and an ``error``, if any."""

    def write_weights(self, path: str, about: Mapping[str, str]) -> str:
        """Write the weights with texts about them; return an error, or an empty text."""


class Attempt:
    """An evaluation as it goes on; `loss` is the lowest of its `losses` so far, with its `metrics`.

    `began` is when the evaluation began, on this process's clock, plus the time in which its losses were recorded.
    ``step`` is this rank's last one. ``has_weights`` says that the leader's trainer has a copy of the weights of the
    lowest loss, and ``copied_step`` after how many losses it has copied the state that it has not written yet; 0 is
    none.

    `restored` is what is known of the state of an evaluation that was interrupted, and which goes on if the objective
    asks for it: it then has its losses, too. `inherited` is that of the individual it comes from, if it begins with
    that, and ``has_read_parent`` says whether the objective has asked for it. `path` is the file of either. `earlier`
    are the seconds that the evaluation took in earlier sessions, where it has a loss of this one already; they are
    known once it goes on from there.
    """

    def __init__(
        self,
        assignment: Assignment,
        checkpoint_info: CheckpointInfo | None = None,
        parent_info: CheckpointInfo | None = None,
        path: Path | None = None,
        earlier_seconds: float | None = None,
    ) -> None:
        self.assignment = assignment
        self.is_first = earlier_seconds is None
        self.earlier_seconds = earlier_seconds or 0.0
        self.checkpoint_info = checkpoint_info
        self.parent_info = parent_info
        self.path = path
        self.has_read_parent = False
        self.losses: list[float] = []
        self.restored_count = 0  # losses of the evaluation that was interrupted
        self.restored_seconds = 0.0  # which those took
        self.step: Step | None = None
        self.copied_step = 0
        self.has_weights = False
        self.saves_own_checkpoints = False  # a program, so that it can be paused
        self.drafts: DraftStore | None = None  # of a program, on the leader
        self.began_at = clock.now()
        self.verdict: Verdict = GOING_VERDICT
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}

    @property
    def has_next_step(self) -> bool:
        """Whether there is another step to take."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """The seconds for which the evaluation has gone on."""
        return clock.now() - self.began_at

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss of its own."""
        return len(self.losses) > self.restored_count

    @property
    def has_checkpoint(self) -> bool:
        """Whether it has begun from a state, without a loss of its own yet; the same on all ranks."""
        return self.checkpoint_info is not None or (self.parent_info is not None and self.verdict.inherited)

    @property
    def offers_weights(self) -> bool:
        """Whether the objective has offered weights with its last step, on this rank."""
        return self.step is not None and self.step.offers

    @property
    def has_saved(self) -> bool:
        """Whether the objective has saved a state with its last step, on this rank."""
        return self.step is not None and self.step.has_saved

    @property
    def total_seconds(self) -> float:
        """The seconds for which it has gone on, also before it was interrupted."""
        return self.seconds + self.restored_seconds

    @property
    def is_aborted(self) -> bool:
        """Whether the evaluation has ended without a result, and ranks may be anywhere in the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def record_step(self, step: Step) -> None:
        """Take in what this rank's objective has done.

        It may have asked for the state that it continues from, or inherits, also if it has failed then.
        """
        self.step = step
        self.has_read_parent |= step.inherited
        if step.went_on and self.checkpoint_info is not None and not self.losses:
            self.restore_losses(self.checkpoint_info.losses, self.checkpoint_info.seconds, self.checkpoint_info.metrics)
            self.has_weights = self.checkpoint_info.has_weights

    def restore_losses(self, losses: Sequence[float], seconds: float, metrics: Mapping[str, float]) -> None:
        """Take over the losses that the evaluation had before it was interrupted or paused, and its seconds."""
        self.losses, self.restored_count, self.restored_seconds = list(losses), len(losses), seconds
        self.earlier_seconds = seconds if self.is_first else self.earlier_seconds
        self.loss, self.metrics = min(losses, default=math.inf), metrics

    def record_verdict(self, verdict: Verdict) -> None:
        """Take over the verdict of all ranks."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.checkpoint_info = self.parent_info = None  # their files may be replaced from now on
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.has_weights = verdict.loss, verdict.metrics, False
