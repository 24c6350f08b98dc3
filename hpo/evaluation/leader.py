"""The leader decides on each loss of its evaluations, keeps checkpoints, and records the ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpo.errors import ExitStatus, StopRequest
from hpo.evaluation.attempt import Attempt, StartingPoint
from hpo.evaluation.verdict import TIMEOUT_PREFIX, State, Verdict
from hpo.process import clock
from hpo.process.messages import Report
from hpo.process.standard_streams import warn
from hpo.store.checkpoints import CheckpointStore, read_checkpoint_info
from hpo.store.evaluations import Evaluation, Progress, find_best
from hpo.text_format import format_error

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.draft_store import Draft
    from hpo.evaluation.weights_saver import WeightsSaver
    from hpo.store.evaluations import Assignment
    from hpo.store.study_client import StudyClient

# Copying takes at most 1% of the training time, and so do copying and writing together.
_TIME_RATIO = 100.0
_DEFAULT_INTERVAL = 10.0  # minimum seconds between writes without --checkpoint-every


@dataclass(frozen=True)
class Limits:
    """When an evaluation, or the whole run, must end."""

    evaluation_timeout: float = math.inf
    """Maximum seconds of an evaluation."""
    max_failures: int | None = None
    """Number of failures after which a run without success stops; None for no limit."""
    target_loss: float = -math.inf
    """The run stops when the loss of an evaluation is at most this value."""
    has_pruner: bool = False
    """Whether a pruner decides on each loss."""
    first_judged_step: int = 1
    """Index of the first step on which the pruner decides; steps count from 1."""


def make_target_stop(target_loss: float) -> StopRequest:
    """Return the request to stop a run that has reached its target loss."""
    reason = f"the loss of --target-loss {target_loss:g} is reached"
    return StopRequest(
        reason, ExitStatus.BUDGET_SPENT, "a lower --target-loss, or --target-loss off"
    )


def find_target_stop(evaluations: Sequence[Evaluation], target_loss: float) -> StopRequest | None:
    """Return the request to stop a search, if its evaluations have reached the target loss."""
    best = find_best(evaluations)
    return make_target_stop(target_loss) if best is not None and best.loss <= target_loss else None


@dataclass
class Leader:
    """Decides on the losses of a worker's evaluations, and records them in the study."""

    _study: StudyClient
    limits: Limits
    _stop: Callable[[StopRequest], None]
    """Called with a request to stop the run."""
    _checkpointer: Checkpointer
    _weights_saver: WeightsSaver | None = None
    """Writes the weights of the best evaluations; None if they are not kept."""

    # The start of an attempt

    def find_start(self, assignment: Assignment) -> StartingPoint:
        """Prepare for a new attempt, and find the checkpoint from which it may start."""
        own = self._checkpointer.find_checkpoint(assignment)
        if own is not None or assignment.parent is None:
            return StartingPoint(own)
        try:
            path = self._checkpointer.find_parent_checkpoint(assignment.parent)
        except ValueError as error:
            self._record_lost_parent(assignment, str(error))
            return StartingPoint()
        return StartingPoint(path, is_own=False)

    def find_progress(self, assignment: Assignment) -> Progress:
        """Return what the individual's previous trial has reached."""
        if assignment.number == assignment.root:
            return Progress()
        return self._study.call.read_progress(assignment.number)

    def reject_checkpoint(self, assignment: Assignment, reason: str, is_own: bool) -> None:
        """Let an evaluation start without its own unusable checkpoint, or without its parent's."""
        if is_own:
            self._checkpointer.reject_checkpoint(assignment, reason)
        else:
            self._record_lost_parent(assignment, reason)

    def _record_lost_parent(self, assignment: Assignment, reason: str) -> None:
        self._study.notify.clear_inheritance(assignment)
        if reason:
            text = f"it starts without the checkpoint of trial {assignment.parent}: {reason}"
            self.warn_once(assignment, text, "inherited")

    # A report

    def decide(self, attempt: Attempt, report: Report, printed: str) -> Verdict:
        """Record a report, and the lines that were printed before it, and return the verdict.

        The time of this call does not count as training time, since a pruner may wait for an
        unavailable database.
        """
        attempt.record_reads(report)
        since = clock.now()
        seconds = attempt.total_seconds
        self.log_output(attempt, printed)
        if report.mistake:
            diverged = not math.isfinite(report.loss)
            return Verdict(State.FAILED, failure=report.mistake, diverged=diverged)
        self.record_resumption(attempt)
        # The loss is recorded before the pruner sees it, so that no crash loses a loss that has
        # decided anything.
        self._study.notify.report(
            attempt.assignment, len(attempt.losses) + 1, report.loss, report.epoch
        )
        verdict = self._judge_loss(attempt, report, seconds)
        keep = self._wants_weights(attempt, report, verdict)
        save = verdict.save
        if report.has_saved and verdict.state == State.RUNNING and not attempt.is_test:
            save = self._checkpointer.is_copy_due()
        attempt.began_at += clock.now() - since
        return replace(verdict, keep=keep, save=save)

    def _judge_loss(self, attempt: Attempt, report: Report, seconds: float) -> Verdict:
        """Apply the limits and the pruner. Without a checkpoint, prune instead of a pause."""
        limits = self.limits
        step = len(attempt.losses) + 1
        verdict = Verdict(State.RUNNING, report.loss, report.metrics, is_last=report.is_last)
        if missing := self._study.objectives.find_missing(report.metrics):
            reported = ", ".join(map(repr, report.metrics)) or "no finite metric"
            failure = (
                f"{missing[0]!r} must be a finite number, since it is an objective, but the first "
                f"rank reported {reported}. Report it with each loss, as in yield loss, "
                f"{{{missing[0]!r}: ...}}"
            )
            return replace(verdict, state=State.FAILED, failure=failure)
        if report.loss <= limits.target_loss:
            return replace(verdict, state=State.COMPLETE)
        if seconds > limits.evaluation_timeout:
            limit = f"{limits.evaluation_timeout:g} s (--evaluation-timeout)"
            failure = f"{TIMEOUT_PREFIX}not finished after {limit}"
            return replace(verdict, state=State.FAILED, failure=failure)
        if not limits.has_pruner or step < limits.first_judged_step or attempt.is_test:
            return verdict
        lowest = report if report.loss < attempt.loss else attempt
        judgement = self._study.call.decide_pruning(
            attempt.assignment, step, lowest.loss, dict(lowest.metrics)
        )
        state = State(judgement.state)
        if state != State.PAUSED:
            return replace(verdict, state=state)
        has_checkpoint = self._checkpointer.is_enabled and report.has_saved
        if not has_checkpoint and not attempt.saves_own_checkpoints:
            return replace(verdict, state=State.PRUNED)
        return replace(verdict, state=State.PAUSED, save=judgement.may_be_promoted)

    def _wants_weights(self, attempt: Attempt, report: Report, verdict: Verdict) -> bool:
        saver = self._weights_saver
        if saver is None or not report.offers_weights or attempt.is_test:
            return False
        if verdict.state not in (State.RUNNING, State.COMPLETE, State.PAUSED):
            return False
        return report.loss < attempt.loss and saver.is_wanted(
            attempt.assignment, report.loss, report.metrics
        )

    def record_resumption(self, attempt: Attempt) -> None:
        """Record the losses before the interruption, once, if the evaluation has resumed."""
        if attempt.restored_count and attempt.is_first and not attempt.has_recorded_resumption:
            attempt.has_recorded_resumption = True
            self._study.notify.record_resume(
                attempt.assignment,
                attempt.losses,
                attempt.restored_seconds,
                attempt.start.progress.epoch,
            )

    def log_output(self, attempt: Attempt, printed: str) -> None:
        """Append lines that the ranks have printed to the log of the evaluation."""
        if printed:
            self._study.notify.log_output(attempt.assignment.number, printed)

    # Copies of weights and checkpoints

    def keep_drafts(
        self,
        attempt: Attempt,
        verdict: Verdict,
        checkpoint: Draft | None,
        weights: Draft | None,
        since: float,
    ) -> None:
        """Keep the drafts that the verdict requires, and remove the others.

        `since` is the time at which copying began, on the clock of `hpo.process.clock`.
        """
        assert attempt.drafts is not None
        if verdict.keep and weights is not None:
            attempt.drafts.keep_weights(weights)
        elif weights is not None:
            weights.remove()
        if verdict.save and checkpoint is not None:
            info = {
                "losses": list(attempt.losses),
                "metrics": dict(attempt.metrics),
                "seconds": attempt.total_seconds,
            }
            attempt.drafts.keep_checkpoint(checkpoint, info)
            self._checkpointer.record_copy(attempt, since)
            if verdict.state != State.PAUSED and self._checkpointer.is_write_due():
                self.commit_checkpoint(attempt)
        elif checkpoint is not None:
            checkpoint.remove()

    def commit_checkpoint(self, attempt: Attempt) -> None:
        """Write the latest checkpoint to its file, unless it is there already, and record it."""
        if not attempt.copied_step:
            return
        try:
            losses = self._checkpointer.write_checkpoint(attempt)
        except (OSError, ValueError) as error:
            self._warn_unsaved(attempt, format_error(error))
        else:
            self._study.notify.record_checkpoint(attempt.assignment, losses)

    def warn_about_copies(
        self, attempt: Attempt, weights_error: str, checkpoint_error: str
    ) -> None:
        """Warn that weights or a checkpoint could not be copied; the losses count nevertheless."""
        if weights_error:
            text = f"the weights of the best so far cannot be kept: {weights_error}"
            self.warn_once(attempt.assignment, text)
        if checkpoint_error:
            self._checkpointer.delay_copy()
            self._warn_unsaved(attempt, checkpoint_error)

    def _warn_unsaved(self, attempt: Attempt, reason: str) -> None:
        text = f"its checkpoint cannot be saved: {reason}"
        self.warn_once(attempt.assignment, text, "unsaved")

    def warn_about_lost_weights(self, attempt: Attempt, verdict: Verdict, reason: str) -> None:
        """Warn if the trainer has ended before it copied the weights of the best loss."""
        if verdict.keep:
            trial = attempt.assignment.label
            warn(f"warning: trial {trial} keeps no weights of its best loss: {reason}")

    def warn_once(self, assignment: Assignment, text: str, kind: str = "") -> None:
        """Print a warning, unless the run has printed the same text, or the same kind, before."""
        if self._study.call.is_first_warning(kind or text):
            warn(f"warning: trial {assignment.label}: {text}")

    # The end

    def decide_on_repetition(self, attempt: Attempt, verdict: Verdict) -> Verdict:
        """Return the final verdict on an attempt.

        If the checkpoint may have caused a failure, the evaluation is repeated without the
        checkpoint. If two attempts in a row must be repeated for another reason than a suspension,
        the evaluation fails.
        """
        if verdict.state == State.REPEATED and verdict.failure and attempt.previous_failure:
            verdict = replace(verdict, state=State.FAILED)
        if verdict.state != State.FAILED or verdict.diverged or not attempt.has_checkpoint:
            return verdict
        is_own = attempt.start.is_own
        attempt.rejects_own_file = attempt.start.own_file is not None
        self.reject_checkpoint(attempt.assignment, verdict.failure, is_own)
        if not is_own:
            attempt.assignment = replace(attempt.assignment, parent=None)
        return replace(verdict, state=State.REPEATED)

    def stop_without_losses(self, reason: str, remedy: str) -> None:
        """Stop a run without any loss. `remedy` is the option that the user must change."""
        if not self._study.call.has_losses():
            self._stop(StopRequest(reason, ExitStatus.NOTHING_SUCCEEDED, remedy))

    def finish_evaluation(self, attempt: Attempt, seconds: float) -> None:
        """Record an ended evaluation; stop the run at its target, or after too many failures."""
        assignment = attempt.assignment
        verdict = attempt.verdict
        if attempt.is_test and verdict.state != State.STOPPED:
            self._study.notify.end_test(assignment, verdict.failure, seconds)
            return
        if verdict.state == State.STOPPED:
            self.commit_checkpoint(attempt)
            self._study.notify.interrupt(assignment, seconds)
            return
        self.record_resumption(attempt)
        has_inherited = attempt.has_read_parent or attempt.restored_count > 0
        if assignment.parent is not None and not has_inherited:
            reason = "the objective has not read worker.parent_checkpoint" if attempt.losses else ""
            self._record_lost_parent(assignment, reason)
        is_parent = verdict.state == State.COMPLETE and self._may_be_inherited(attempt)
        if verdict.save or is_parent:
            self.commit_checkpoint(attempt)
        self._record_end(attempt, seconds)
        if is_parent:
            self._study.notify.drop_superseded(assignment.number)
        elif not verdict.save and self._checkpointer.has_file(assignment):
            # Otherwise a crash at this point would lose both the result and the checkpoint.
            self._study.call.commit()
            self._checkpointer.discard_checkpoint(assignment)

    def _may_be_inherited(self, attempt: Attempt) -> bool:
        """Return whether an evaluation has a final checkpoint, and is good enough for a parent."""
        number = attempt.assignment.number
        if not self._checkpointer.islands:
            return False
        # The checkpoint of the last loss may be a copy, or be in the file already.
        steps = (attempt.copied_step, self._study.call.read_checkpoint_step(number))
        if len(attempt.losses) not in steps:
            # At the target loss, an evaluation ends before its last epoch, without a checkpoint.
            if not self._is_cut(attempt):
                text = "it cannot be a parent: it has not called worker.save_checkpoint before its"
                self.warn_once(attempt.assignment, f"{text} last loss", "parent")
            return False
        return self._study.call.is_parent_candidate(number, attempt.loss)

    def _is_cut(self, attempt: Attempt) -> bool:
        """Return whether the target loss has ended a complete evaluation."""
        return attempt.loss <= self.limits.target_loss and not attempt.verdict.is_last

    def _record_end(self, attempt: Attempt, seconds: float) -> None:
        assignment = attempt.assignment
        verdict = attempt.verdict
        study = self._study
        if verdict.state == State.COMPLETE:
            cut = {"cut_after": len(attempt.losses)} if self._is_cut(attempt) else {}
            study.notify.complete(assignment, attempt.loss, seconds, dict(attempt.metrics), **cut)
            if self._weights_saver and attempt.has_weights and attempt.drafts is not None:
                self._weights_saver.save_weights(assignment, attempt.drafts)
            if attempt.loss <= self.limits.target_loss:
                self._stop(make_target_stop(self.limits.target_loss))
        elif verdict.state in (State.PRUNED, State.PAUSED):
            paused = {"paused_after": len(attempt.losses)} if verdict.state == State.PAUSED else {}
            study.notify.prune(assignment, attempt.loss, seconds, dict(attempt.metrics), **paused)
        else:
            study.notify.fail(assignment, verdict.failure, verdict.traceback, seconds)
            maximum = self.limits.max_failures
            if maximum is not None and study.call.count_initial_failures() >= maximum:
                reason = f"{maximum} evaluations failed and none succeeded (--max-failures)"
                self._stop(StopRequest(reason, ExitStatus.NOTHING_SUCCEEDED))


@dataclass
class Checkpointer:
    """Copies and writes the checkpoints of the evaluations of one worker.

    After a loss, the trainer copies the latest checkpoint to a draft. The draft is written to the
    evaluation's checkpoint file at intervals, and when the run stops.
    """

    _checkpoints: CheckpointStore
    every: float | None
    """Seconds between writes. Infinity disables checkpoints. None limits copying and writing to 1%
    of the training time."""
    islands: int = 0
    """Number of islands in population based training, otherwise 0. If it is not 0, each checkpoint
    is copied, and the final checkpoint of a completed evaluation is written."""
    _seconds_to_copy: float = 0.0
    _seconds_to_write: float = 0.0
    _copied_at: float = -math.inf
    _written_at: float = -math.inf

    def find_checkpoint(self, assignment: Assignment) -> Path | None:
        """Restart the intervals, and return the file of an evaluation's checkpoint, if it is valid.

        An invalid file is removed, with a warning.
        """
        self._copied_at = clock.now()
        self._written_at = self._copied_at
        path = self._checkpoints.get_path(assignment.root)
        if not path.exists():
            return None
        try:
            read_checkpoint_info(path, assignment.params)
        except ValueError as error:
            self.reject_checkpoint(assignment, str(error))
            return None
        return path

    def find_parent_checkpoint(self, parent: int) -> Path:
        """Return the checkpoint file of a parent.

        Raises:
            ValueError: The file cannot be read. It is removed, so that no other evaluation tries to
                read it.
        """
        path = self._checkpoints.get_path(parent)
        try:
            read_checkpoint_info(path)
        except ValueError:
            self._checkpoints.remove_checkpoint(parent)
            raise
        return path

    def reject_checkpoint(self, assignment: Assignment, reason: str) -> None:
        """Remove a checkpoint from which its evaluation cannot resume, with a warning."""
        warn(
            f"warning: trial {assignment.label} restarts, since it cannot resume from its "
            f"checkpoint: {reason}"
        )
        self._checkpoints.remove_checkpoint(assignment.root)

    @property
    def is_enabled(self) -> bool:
        """Whether checkpoints are kept at all."""
        return self.every != math.inf

    def is_copy_due(self) -> bool:
        """Return whether the latest checkpoint of a running evaluation must be copied now."""
        if self.islands > 0:
            return True
        if not self.is_enabled:
            return False
        elapsed = clock.now() - self._copied_at
        return elapsed >= _TIME_RATIO * self._seconds_to_copy or self.is_write_due()

    def record_copy(self, attempt: Attempt, since: float) -> None:
        """Record that the checkpoint of the latest loss was copied; copying began at `since`."""
        self._copied_at = clock.now()
        self._seconds_to_copy = self._copied_at - since
        attempt.copied_step = len(attempt.losses)

    def delay_copy(self) -> None:
        """Restart the interval to the next copy, since a copy has failed."""
        self._copied_at = clock.now()

    def write_checkpoint(self, attempt: Attempt) -> int:
        """Write the latest checkpoint to its file, and return its number of losses.

        Raises OSError or ValueError if it cannot be written.
        """
        assert attempt.drafts is not None
        began = clock.now()
        try:
            with self._checkpoints.replace_checkpoint(attempt.assignment.root) as draft:
                return attempt.drafts.make_checkpoint_file(draft)
        finally:
            self._written_at = clock.now()
            self._seconds_to_write = self._written_at - began
            attempt.copied_step = 0

    def has_file(self, assignment: Assignment) -> bool:
        """Return whether an evaluation has a checkpoint file."""
        return self._checkpoints.get_path(assignment.root).exists()

    def discard_checkpoint(self, assignment: Assignment) -> None:
        """Remove the checkpoint of an evaluation that has ended."""
        self._checkpoints.remove_checkpoint(assignment.root)

    def is_write_due(self) -> bool:
        """Return whether the latest checkpoint must be written to its file now."""
        interval = self.every
        if interval is None:
            seconds = self._seconds_to_copy + self._seconds_to_write
            interval = max(_DEFAULT_INTERVAL, _TIME_RATIO * seconds)
        return clock.now() - self._written_at >= interval
