"""The state of one attempt at an evaluation on one rank: its losses, its latest step and its verdict.

All attempts at an evaluation (training of one individual) belong to the same trial of the study.
For example, another attempt follows if the template crashes.
"""

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
    """Interface of an object that can write an evaluation's latest checkpoint, and the weights of its lowest loss."""

    def write_checkpoint(self, path: str) -> Mapping[str, Any]:
        """Write the latest checkpoint to the file `path`.

        Returns:
            A mapping with `losses`, the number of losses in the checkpoint, and `seconds`, the time to write it. If the
            write has failed, `losses` is 0, and `error` is the message.
        """

    def write_weights(self, path: str, metadata: Mapping[str, str]) -> str:
        """Write the weights of the lowest loss, with `metadata`, to `path`.

        Return an error message, or an empty string.
        """


class Attempt:
    """One attempt at an evaluation, as a rank of the worker records it.

    Args:
        assignment: The individual and the number of its trial.
        checkpoint_info: Description of the evaluation's own checkpoint, from which the objective may resume. None if
            there is none.
        parent_info: Description of the parent checkpoint, from which the evaluation may start. None if there is none.
        path: File of the checkpoint that `checkpoint_info` or `parent_info` describes.
        earlier_seconds: Seconds of training before the evaluation was interrupted or paused, from an earlier attempt.
            None if no earlier attempt has reported a loss.

    Attributes:
        losses: All losses so far. They include the losses before an interruption if the objective has resumed.
        loss: The lowest of `losses`; infinite before the first loss.
        metrics: Metrics that were reported with `loss`.
        began_at: Start of the attempt on the clock of `hpo.process.clock`, plus the time spent on recording its losses.
        step: The latest step of this rank.
        copied_step: Number of losses in the latest checkpoint if it was copied and is not yet in a file, otherwise 0.
        has_weights: Whether the leader can write the weights of the lowest loss.
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
        """Whether the evaluation continues with another step."""
        return self.verdict.state == "going"

    @property
    def is_test(self) -> bool:
        """Whether the evaluation only tests a suspected worker (see `hpo.store.worker_health`)."""
        return self.assignment.tests is not None

    @property
    def seconds(self) -> float:
        """Seconds since the attempt began, without the time spent on recording its losses."""
        return clock.now() - self.began_at

    @property
    def has_loss(self) -> bool:
        """Whether the objective has reported a loss in this attempt. Restored losses do not count."""
        return len(self.losses) > self.restored_count

    @property
    def has_checkpoint(self) -> bool:
        """Whether the attempt has a checkpoint and no new loss, so that a failure may come from the checkpoint.

        A parent checkpoint counts only if the objective has read it on some rank. The value is the same on all ranks.
        """
        return self.checkpoint_info is not None or (self.parent_info is not None and self.verdict.inherited)

    @property
    def offers_weights(self) -> bool:
        """Whether the objective has called `offer_weights` in its latest step on this rank."""
        return self.step is not None and self.step.offers

    @property
    def has_saved(self) -> bool:
        """Whether the objective has saved a checkpoint in its latest step on this rank."""
        return self.step is not None and self.step.has_saved

    @property
    def total_seconds(self) -> float:
        """Seconds of this attempt, plus the seconds of training before an interruption if the objective has resumed."""
        return self.seconds + self.restored_seconds

    @property
    def is_aborted(self) -> bool:
        """Whether a failure or an external cause has ended the attempt. Ranks may then still run the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def record_step(self, step: Step) -> None:
        """Record a step of the objective on this rank.

        If the objective has read its checkpoint, the losses before the checkpoint are restored.
        """
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
        """Record the verdict (the decision of all ranks on a step), and add its loss, if any, to `losses`."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.checkpoint_info = self.parent_info = None  # their files may be replaced from now on
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.has_weights = verdict.loss, verdict.metrics, False
