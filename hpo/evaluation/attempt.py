"""The state of one attempt at an evaluation on one rank: its losses, its last step and its verdict."""

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
    """An object that holds the last checkpoint of an evaluation and the weights of its lowest loss."""

    def write_checkpoint(self, path: str) -> Mapping[str, Any]:
        """Write the last checkpoint to `path`.

        Returns:
            `losses`, the number of losses before the checkpoint; `seconds`, the time to write it; `error`, if it
            failed.
        """

    def write_weights(self, path: str, metadata: Mapping[str, str]) -> str:
        """Write the weights with `metadata` to `path`, and return an error message, or an empty string."""


class Attempt:
    """One attempt at an evaluation, as a rank of the worker sees it.

    Args:
        assignment: The individual, with its trial and its hyperparameters.
        checkpoint_info: Description of the evaluation's own checkpoint, from which the objective may resume.
        parent_info: Description of the parent checkpoint, with which the evaluation may begin.
        path: File of the own checkpoint or of the parent checkpoint.
        earlier_seconds: Seconds that the evaluation took in earlier sessions. None if it has no loss of this session.

    Attributes:
        losses: All losses so far, with the losses of an interrupted attempt if the objective has resumed it.
        loss: The lowest of `losses`, infinite before the first one; `metrics` belong to it.
        began_at: Start of the evaluation on this process's clock, plus the time in which its losses were recorded.
        step: The last step of this rank.
        copied_step: Number of losses before the checkpoint that was copied and not yet written; 0 for none.
        has_weights: Whether the leader's trainer has a copy of the weights of the lowest loss.
        has_read_parent: Whether the objective has read the parent checkpoint.
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
        self.restored_count = 0  # losses of the interrupted attempt
        self.restored_seconds = 0.0  # time of the restored losses
        self.step: Step | None = None
        self.copied_step = 0
        self.has_weights = False
        self.saves_own_checkpoints = False  # true for programs that write their own files: they can be paused
        self.drafts: DraftStore | None = None  # set for a program, on the leader
        self.began_at = clock.now()
        self.verdict: Verdict = GOING_VERDICT
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}

    @property
    def has_next_step(self) -> bool:
        """Whether the evaluation has another step."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """Seconds since the evaluation began."""
        return clock.now() - self.began_at

    @property
    def has_loss(self) -> bool:
        """Whether this attempt has a loss of its own."""
        return len(self.losses) > self.restored_count

    @property
    def has_checkpoint(self) -> bool:
        """Whether the attempt has begun from a checkpoint and has no loss of its own; the same on all ranks."""
        return self.checkpoint_info is not None or (self.parent_info is not None and self.verdict.inherited)

    @property
    def offers_weights(self) -> bool:
        """Whether the objective has offered weights in its last step on this rank."""
        return self.step is not None and self.step.offers

    @property
    def has_saved(self) -> bool:
        """Whether the objective has saved a checkpoint in its last step on this rank."""
        return self.step is not None and self.step.has_saved

    @property
    def total_seconds(self) -> float:
        """Seconds of the evaluation, with the seconds before it was interrupted."""
        return self.seconds + self.restored_seconds

    @property
    def is_aborted(self) -> bool:
        """Whether the evaluation has ended without a result, so that its ranks may still run the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def record_step(self, step: Step) -> None:
        """Record a step of this rank's objective, and restore earlier losses if it has read its checkpoint."""
        self.step = step
        self.has_read_parent |= step.inherited
        if step.went_on and self.checkpoint_info is not None and not self.losses:
            self.restore_losses(self.checkpoint_info.losses, self.checkpoint_info.seconds, self.checkpoint_info.metrics)
            self.has_weights = self.checkpoint_info.has_weights

    def restore_losses(self, losses: Sequence[float], seconds: float, metrics: Mapping[str, float]) -> None:
        """Restore the losses, seconds and metrics from before the evaluation was interrupted or paused."""
        self.losses, self.restored_count, self.restored_seconds = list(losses), len(losses), seconds
        self.earlier_seconds = seconds if self.is_first else self.earlier_seconds
        self.loss, self.metrics = min(losses, default=math.inf), metrics

    def record_verdict(self, verdict: Verdict) -> None:
        """Record the verdict of all ranks on a step."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.checkpoint_info = self.parent_info = None  # their files may be replaced from now on
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.has_weights = verdict.loss, verdict.metrics, False
