"""The state of one attempt at an evaluation on one rank: its start, its losses and its verdict.

All attempts at an evaluation belong to the same trial of the study. For example, another attempt
follows if the template crashes. All evaluations of a run share a context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from hpo.evaluation.verdict import RUNNING_VERDICT, RankEnd, State, Verdict
from hpo.process import clock
from hpo.store.evaluations import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.draft_store import DraftStore
    from hpo.evaluation.program import Program
    from hpo.process.messages import Report
    from hpo.process.user_frames import UserFrames
    from hpo.store.checkpoints import CheckpointInfo
    from hpo.store.evaluations import Assignment
    from hpo.store.run_dir import RunDir


@dataclass(frozen=True)
class EvaluationContext:
    """Settings that all evaluations of a run share, on all ranks."""

    user_frames: UserFrames
    """Finds the lines of the user's code in stacks."""
    seed: int
    """Seed of individuals that have no seed of their own."""
    files: RunDir
    """Directory with a folder for each evaluation, in which a program also writes its drafts."""
    prefix: str = ""
    """Prefix of the names of these folders and drafts."""
    program: Program | None = None
    """The program of the run; None if the objective is a function."""
    keeps_checkpoints: bool = True
    """Whether checkpoints of a program are kept."""
    began_at: float = field(default_factory=time.time)
    """Time at which the run began, in seconds since the epoch."""
    is_traced: bool = False
    """Whether trainers record a trace of each evaluation."""

    def describe_evaluation(self, assignment: Assignment, ranks: int) -> dict[str, Any]:
        """Return values that a program may use. All trials of an individual share them.

        The worker has this number of `ranks`, which another trial may not have.
        """
        name = f"{self.prefix}{assignment.root}"
        return {
            "trial": assignment.root,
            "folder": self.files.trial_folders.absolute() / name,
            "seed": self.seed if assignment.seed is None else assignment.seed,
            "ranks": ranks,
            "drafts": self.files.checkpoints.absolute() / f".{name}",
            "saves": self.keeps_checkpoints,
        }


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint from which an attempt may start.

    A program that resumes from its own files has its progress instead.
    """

    path: Path | None = None
    """File of the checkpoint; None if there is none."""
    is_own: bool = True
    """Whether it is the evaluation's own checkpoint. Otherwise it is the parent checkpoint."""
    info: CheckpointInfo | None = None
    """Content of the checkpoint, without its tensors."""
    own_file: Path | None = None
    """File of its own from which a program resumes; None if it does not."""
    progress: Progress = field(default_factory=Progress)
    """What a program has reached before, if it resumes from its own file."""


@dataclass(eq=False)
class Attempt:
    """One attempt at an evaluation, on one rank of the worker. Only the leader's has losses."""

    assignment: Assignment
    start: StartingPoint = field(default_factory=StartingPoint)
    """The checkpoint from which the objective may start; empty after the first loss."""
    previous: InitVar[Attempt | None] = None
    """The attempt that is repeated; None if this is the first attempt."""
    previous_failure: str = ""
    rejects_own_file: bool = False
    """Whether the next attempt must not resume from the program's own file."""
    is_first: bool = True
    """Whether no earlier attempt has reported a loss."""
    earlier_seconds: float = 0.0
    """Seconds of training before the evaluation was interrupted or paused."""
    losses: list[float] = field(default_factory=list)
    """All losses so far, and those before an interruption if the objective has resumed."""
    loss: float = math.inf
    """The lowest of `losses`; infinite before the first loss."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were reported with `loss`."""
    restored_count: int = 0
    """Number of losses of the interrupted attempt."""
    restored_seconds: float = 0.0
    """Seconds of training until the last of the restored losses."""
    has_recorded_resumption: bool = False
    """Whether the study has the restored losses, as those of this attempt's trial."""
    began_at: float = field(default_factory=lambda: clock.now())
    """Start of the attempt on `hpo.process.clock`, plus the time spent on recording its losses."""
    verdict: Verdict = RUNNING_VERDICT
    drafts: DraftStore | None = None
    """Copies of checkpoints and weights; set on the leader."""
    reports: int = 0
    """Number of reports of a program that has ended, also after the last that counts."""
    copied_step: int = 0
    """Number of losses in the latest checkpoint if it is not yet in its file, otherwise 0."""
    saves_own_checkpoints: bool = False
    """Whether it is a program that writes its own files: it can be paused."""
    has_read_parent: bool = False
    """Whether the objective has read the parent checkpoint on any rank."""

    def __post_init__(self, previous: Attempt | None) -> None:
        if previous is not None:
            self.is_first = previous.is_first and not previous.has_loss
            self.earlier_seconds = 0.0 if self.is_first else previous.earlier_seconds
            self.previous_failure = previous.verdict.failure
        if self.start.progress.losses:
            self._restore_losses(self.start.progress.losses, self.start.progress.seconds)

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
        """Whether the objective has reported a loss in this attempt, besides restored losses."""
        return len(self.losses) > self.restored_count

    @property
    def has_checkpoint(self) -> bool:
        """Whether a failure may come from the checkpoint, since no loss has followed it.

        A parent checkpoint counts only if the objective has read it on some rank.
        """
        if self.start.own_file is not None:
            return not self.has_recorded_resumption
        return self.start.info is not None and (self.start.is_own or self.has_read_parent)

    @property
    def total_seconds(self) -> float:
        """Seconds of this attempt, and of the training before it if the objective has resumed."""
        return self.seconds + self.restored_seconds

    @property
    def is_aborted(self) -> bool:
        """Whether a failure or an external cause ended the attempt. Ranks may still run it."""
        return self.verdict.state in (State.FAILED, State.REPEATED, State.STOPPED)

    @property
    def is_stopped(self) -> bool:
        """Whether the whole run stops, so that the evaluation has no result."""
        return self.verdict.state == State.STOPPED

    def record_ends(self, ends: Sequence[RankEnd]) -> None:
        """Record the ends of the objective on all ranks, in their order; call it on the leader."""
        self.record_reads(ends[0])
        self.has_read_parent |= any(end.has_read_parent for end in ends)

    def record_reads(self, reader: Report | RankEnd) -> None:
        """If the objective has read its checkpoint, restore the losses before the checkpoint."""
        self.has_read_parent |= reader.has_read_parent
        start = self.start
        if reader.has_resumed and start.is_own and start.info is not None and not self.losses:
            self._restore_losses(start.info.losses, start.info.seconds)
            self.metrics = start.info.metrics
            if start.info.has_weights and self.drafts is not None and start.path is not None:
                self.drafts.restore_weights(start.path)

    def _restore_losses(self, losses: Sequence[float], seconds: float) -> None:
        """Restore the progress from before the evaluation was interrupted or paused."""
        self.losses = list(losses)
        self.restored_count = len(losses)
        self.restored_seconds = seconds
        if self.is_first:
            self.earlier_seconds = seconds
        self.loss = min(losses, default=math.inf)

    def skip_missing_losses(self, count: int) -> None:
        """Count epochs whose losses are not known, before the first loss after a resume."""
        self.losses += [math.inf] * count
        self.restored_count += count

    @property
    def has_weights(self) -> bool:
        """Whether the leader can write the weights of the lowest loss."""
        return self.drafts is not None and self.drafts.has_weights

    def close_drafts(self) -> None:
        """Remove the copies of checkpoints and weights."""
        if self.drafts is not None:
            self.drafts.close()

    def record_verdict(self, verdict: Verdict) -> None:
        """Record the verdict on a report or on the end, and add its loss, if any, to `losses`."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.start = StartingPoint()  # The file of its checkpoint may be replaced from now on.
            if verdict.loss < self.loss:
                self.loss = verdict.loss
                self.metrics = verdict.metrics
                if self.drafts is not None:
                    self.drafts.drop_weights()
