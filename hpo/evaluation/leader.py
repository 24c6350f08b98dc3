"""What the leader of a worker does for its evaluations: it decides on each loss, and records how they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.errors import ExitStatus, StopRequest
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.step_verdict import TIMEOUT_PREFIX, Verdict
from hpo.process import clock
from hpo.process.standard_streams import warn

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import CopyHolder
    from hpo.evaluation.checkpointer import Checkpointer
    from hpo.evaluation.trainer_client import TrainerSlot
    from hpo.evaluation.weights_saver import WeightsSaver
    from hpo.store.evaluations import Assignment
    from hpo.store.study_client import StudyClient


@dataclass(frozen=True)
class Limits:
    """When to end an evaluation, a run in which nothing succeeds, or one that is good enough.

    `evaluation_timeout` is in seconds; `max_failures` counts failed evaluations before any success. `prunes` says that
    a pruner judges each loss, from `first_judged_step` on, counted from 1.
    """

    evaluation_timeout: float = math.inf
    max_failures: int | None = None
    target_loss: float = -math.inf
    has_pruner: bool = False
    first_judged_step: int = 1


def make_target_stop(target_loss: float) -> StopRequest:
    """Return the stop of a run that has reached its target loss."""
    reason = f"the loss of --target-loss {target_loss:g} is reached"
    return StopRequest(reason, ExitStatus.BUDGET_SPENT, "a lower --target-loss, or --target-loss off")


def _describe_missing_metric(missing: Sequence[str], metrics: Mapping[str, float]) -> str:
    """Return why an evaluation fails that has not reported all objectives."""
    there = ", ".join(map(repr, metrics)) or "no finite metric"
    return (
        f"the first rank has not reported {missing[0]!r} as a finite number with the loss, which the objectives need, "
        f"but {there}: report it each time, as in yield loss, {{{missing[0]!r}: ...}}"
    )


class Leader:
    """Decides on losses, and records them, and what objectives print.

    `slot` has the leader's trainer, which keeps weights and states. `stop` is called to stop the run; `keeper` keeps
    the weights of the best, None if they are not to be kept, and `saver` what evaluations go on from after a crash.
    """

    def __init__(
        self,
        recorder: StudyClient,
        slot: TrainerSlot,
        limits: Limits,
        stop: Callable[[StopRequest], None],
        weights_saver: WeightsSaver | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.limits = limits
        self._recorder = recorder
        self._slot = slot
        self._stop = stop
        self._weights_saver = weights_saver
        self._checkpointer = checkpointer

    def decide(self, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Record what all ranks have said of a step, and return the final verdict: how the evaluation goes on.

        The time that this takes is not counted as the evaluation's: a pruner may wait for a database that is away.
        """
        since, seconds = clock.now(), attempt.total_seconds
        self._recorder.log_output(attempt.assignment.number, printed)
        if verdict.loss is not None:
            self._record_resumption(attempt)
            self._recorder.report(attempt.assignment, len(attempt.losses) + 1, verdict.loss)
            verdict = self._apply_limits(attempt, verdict, verdict.loss, seconds)
            keep, save = self._wants_weights(attempt, verdict), self._wants_checkpoint(attempt, verdict)
            verdict = replace(verdict, keep=keep, save=save)
        attempt.began_at += clock.now() - since
        return verdict

    def _wants_weights(self, attempt: Attempt, verdict: Verdict) -> bool:
        if (
            self._weights_saver is None
            or not attempt.offers_weights
            or verdict.state not in ("going", "complete", "paused")
        ):
            return False
        assert verdict.loss is not None
        return verdict.loss < attempt.loss and self._weights_saver.is_wanted(
            attempt.assignment, verdict.loss, verdict.metrics
        )

    def _wants_checkpoint(self, attempt: Attempt, verdict: Verdict) -> bool:
        if self._checkpointer is None or not attempt.has_saved or verdict.state != "going":
            return verdict.save
        return self._checkpointer.is_copy_due()

    def _record_resumption(self, attempt: Attempt) -> None:
        """Record the losses that an evaluation had in an earlier session, if it has gone on from there."""
        if attempt.restored_count and attempt.is_first and not attempt.has_loss:
            self._recorder.record_resume(attempt.assignment, attempt.losses, attempt.restored_seconds)

    def _apply_limits(self, attempt: Attempt, verdict: Verdict, loss: float, seconds: float) -> Verdict:
        limits = self.limits
        if missing := self._recorder.objectives.find_missing(verdict.metrics):
            return replace(verdict, state="failed", failure=_describe_missing_metric(missing, verdict.metrics))
        if loss <= limits.target_loss:
            return replace(verdict, state="complete")
        if seconds > limits.evaluation_timeout:
            reason = f"{TIMEOUT_PREFIX}still going on after {limits.evaluation_timeout:g} s (--evaluation-timeout)"
            return replace(verdict, state="failed", failure=reason)
        is_judged = limits.has_pruner and len(attempt.losses) + 1 >= limits.first_judged_step
        return self._apply_pruner(attempt, verdict) if is_judged else verdict

    def _apply_pruner(self, attempt: Attempt, verdict: Verdict) -> Verdict:
        """Let the pruner judge an evaluation; one that does not save cannot pause."""
        assert verdict.loss is not None
        is_lowest = verdict.loss < attempt.loss
        loss, metrics = (verdict.loss, verdict.metrics) if is_lowest else (attempt.loss, attempt.metrics)
        judgement = self._recorder.decide_pruning(attempt.assignment, len(attempt.losses) + 1, loss, metrics)
        if judgement.state != "paused":
            return replace(verdict, state=judgement.state)
        can_pause = self.can_resume_elsewhere(attempt)
        return replace(verdict, state="paused" if can_pause else "pruned", save=can_pause and judgement.may_be_promoted)

    def can_resume_elsewhere(self, attempt: Attempt) -> bool:
        """Tell whether the objective has saved with this loss what it goes on from."""
        return attempt.saves_own_checkpoints or (
            self._checkpointer is not None and self._checkpointer.is_enabled and attempt.has_saved
        )

    def can_move_to_workers(self, attempt: Attempt) -> bool:
        """Tell whether the objective has saved with this loss what can be handed on to other workers."""
        return self._checkpointer is not None and self._checkpointer.can_copy and self.can_resume_elsewhere(attempt)

    def describe_checkpoint(self, attempt: Attempt) -> dict[str, Any]:
        """Return what a state says of its evaluation."""
        return {
            "losses": list(attempt.losses),
            "metrics": dict(attempt.metrics),
            "seconds": attempt.total_seconds,
        }

    def make_draft_path(self, attempt: Attempt) -> str:
        """Return where the trainer is to write the state of this loss; empty if it is not to be written now."""
        if self._checkpointer is None or attempt.verdict.state == "paused":
            return ""
        is_due = attempt.verdict.state == "regrouped" or self._checkpointer.is_write_due()
        return self._checkpointer.make_draft_path(attempt) if is_due else ""

    def record_copies(self, attempt: Attempt, verdict: Verdict, kept: Mapping[str, Any], since: float) -> None:
        """Learn what the trainer has kept of a loss, which it has done since a time."""
        for text in kept["warnings"]:
            warn(f"warning: {text}")
        if verdict.keep:
            attempt.has_weights = bool(kept["has_weights"])
        if (
            self._checkpointer is not None
            and verdict.save
            and (losses := self._checkpointer.record_copy(attempt, kept, since))
        ):
            self._recorder.record_checkpoint(attempt.assignment, losses)

    def keep_drafts(self, attempt: Attempt, verdict: Verdict, names: tuple[str, str], since: float) -> None:
        """Keep the drafts of a program's loss that are wanted, its checkpoint and its weights; drop the others."""
        drafts, (checkpoint, weights) = attempt.drafts, names
        assert drafts is not None
        attempt.has_weights = drafts.keep_weights(weights) if verdict.keep else attempt.has_weights
        if not verdict.keep:
            drafts.drop_draft(weights)
        kept: dict[str, Any] = {"warnings": [], "has_weights": attempt.has_weights}
        if not verdict.save:
            drafts.drop_draft(checkpoint)
        elif checkpoint and drafts.keep_checkpoint(checkpoint, self.describe_checkpoint(attempt), attempt.has_weights):
            if draft := self.make_draft_path(attempt):
                kept["written"] = drafts.write_checkpoint(draft)
            self.record_copies(attempt, verdict, kept, since)

    def record_lost_copies(self, attempt: Attempt, verdict: Verdict, reason: str) -> None:
        """Warn that weights of a loss are lost, since the trainer has ended, and remove the draft of a state."""
        attempt.has_weights &= not verdict.keep
        if verdict.keep and (verdict.is_last or verdict.state == "complete"):  # otherwise the evaluation fails
            warn(f"warning: trial {attempt.assignment.number} keeps no weights of its best loss: {reason}")
        if self._checkpointer is not None:
            self._checkpointer.drop_draft(attempt)

    def find_losses(self, assignment: Assignment) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that this evaluation repeats; none for a first attempt."""
        return (
            self._recorder.read_previous_losses(assignment.number)
            if assignment.number != assignment.root
            else ([], 0.0)
        )

    def stop_without_losses(self, reason: str, remedy: str) -> None:
        """Stop the run if no evaluation has found a loss so far: the others would not find one without the remedy."""
        if not self._recorder.has_losses():
            self._stop(StopRequest(reason, ExitStatus.NOTHING_SUCCEEDED, remedy))

    def warn_once(self, attempt: Attempt, text: str) -> None:
        """Warn of something in an evaluation, unless the run has warned of it before."""
        if self._recorder.is_first_warning(text):
            warn(f"warning: trial {attempt.assignment.number}: {text}")

    def find_start(self, assignment: Assignment) -> tuple[Path | None, bool]:
        """Begin an evaluation, and return the file of its own state, or of what it inherits, and whether it is its own.

        The file is None where it begins anew.
        """
        if self._checkpointer is None:
            return None, True
        self._checkpointer.reset_timer()
        if (own := self._checkpointer.find_checkpoint(assignment)) or assignment.parent is None:
            return own, True
        try:
            return self._checkpointer.find_parent_checkpoint(assignment.parent), False
        except ValueError as error:
            self._record_lost_parent(assignment, str(error))
            return None, True

    def reject_checkpoint(self, assignment: Assignment, reason: str, is_own: bool) -> None:
        """Let an evaluation begin anew, since it cannot go on from its state, or from what it was to inherit."""
        if self._checkpointer is not None and is_own:
            self._checkpointer.reject_checkpoint(assignment, reason)
        elif not is_own:
            self._record_lost_parent(assignment, reason)

    def write_checkpoint(self, attempt: Attempt) -> None:
        """Let the trainer write the last state of an evaluation that ends here, and is to go on."""
        if self._checkpointer is None or not attempt.copied_step:
            return
        copies = self._find_copies(attempt)
        if copies is not None and (losses := self._checkpointer.write_checkpoint(attempt, copies)):
            self._recorder.record_checkpoint(attempt.assignment, losses)

    def _find_copies(self, attempt: Attempt) -> CopyHolder | None:
        """Return what holds the last state and the weights of an evaluation; None if its trainer has ended."""
        if attempt.drafts is not None:
            return attempt.drafts
        return self._slot.trainer if self._slot.is_ready else None

    def finish_evaluation(self, attempt: Attempt, seconds: float) -> None:
        """Record how an evaluation has ended; stop the run where it has reached its target, or seems to be in vain."""
        assignment, verdict = attempt.assignment, attempt.verdict
        if verdict.state == "stopped":
            self.write_checkpoint(attempt)
            self._recorder.interrupt(assignment)
            return
        self._record_resumption(attempt)
        if assignment.parent is not None and not attempt.has_read_parent and not attempt.restored_count:
            self._record_lost_parent(
                assignment, "the objective has not asked for worker.parent_checkpoint" if attempt.losses else ""
            )
        bequeaths = verdict.state == "complete" and self._may_be_inherited(attempt)
        if verdict.save or bequeaths:
            self.write_checkpoint(attempt)
        self._record_end(attempt, seconds)
        if self._checkpointer is not None and bequeaths:
            self._recorder.drop_superseded(assignment.number)
        elif self._checkpointer is not None and not verdict.save and self._checkpointer.has_file(assignment):
            self._recorder.flush()  # a death in between would cost both its end and its state
            self._checkpointer.discard_checkpoint(assignment)

    def _record_lost_parent(self, assignment: Assignment, reason: str) -> None:
        """Record that an evaluation has begun without what it was to inherit, and say why, if there is a reason."""
        self._recorder.clear_inheritance(assignment)
        if self._checkpointer is not None and reason:
            text = f"trial {assignment.number} begins without what trial {assignment.parent} has learned: {reason}"
            self._checkpointer.warn_once("inherited", text)

    def _may_be_inherited(self, attempt: Attempt) -> bool:
        """Tell whether others may inherit from an evaluation that is complete: it has saved, and is among the best."""
        saver, number = self._checkpointer, attempt.assignment.number
        if saver is None or not saver.islands:
            return False
        if not saver.has_last_checkpoint(attempt, self._recorder.read_checkpoint_step(number)):
            text = f"nothing can be inherited from trial {number}: it has not saved what it is at its end"
            saver.warn_once("bequeathed", f"{text} (worker.save_checkpoint, before its last loss)")
            return False
        return self._recorder.is_parent_candidate(number, attempt.loss)

    def _record_end(self, attempt: Attempt, seconds: float) -> None:
        assignment, verdict, record = attempt.assignment, attempt.verdict, self._recorder
        if verdict.state == "complete":
            is_cut = attempt.loss <= self.limits.target_loss and not verdict.is_last
            cut = {"cut_after": len(attempt.losses)} if is_cut else {}
            record.complete(assignment, attempt.loss, seconds, attempt.metrics, **cut)
            copies = self._find_copies(attempt)
            if self._weights_saver and attempt.has_weights and copies is not None:
                self._weights_saver.save_weights(assignment, copies)
            if attempt.loss <= self.limits.target_loss:
                self._stop(make_target_stop(self.limits.target_loss))
        elif verdict.state in ("pruned", "paused"):
            paused = {"paused_after": len(attempt.losses)} if verdict.state == "paused" else {}
            record.prune(assignment, attempt.loss, seconds, attempt.metrics, **paused)
        else:
            record.fail(assignment, verdict.failure, verdict.traceback, seconds)
            most = self.limits.max_failures
            if most is not None and record.count_initial_failures() >= most:
                reason = f"{most} evaluations failed and none succeeded (--max-failures)"
                self._stop(StopRequest(reason, ExitStatus.NOTHING_SUCCEEDED))
