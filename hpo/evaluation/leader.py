"""What the leader of a worker does for its evaluations: it decides on each loss, and records how they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.errors import Exit, Stop
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.verdict import TIMEOUT, Verdict
from hpo.process import clock
from hpo.process.printed import warn

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import Copies
    from hpo.evaluation.keeper import WeightsKeeper
    from hpo.evaluation.saver import Saver
    from hpo.evaluation.trainer import TrainerSlot
    from hpo.store.evaluations import Assignment
    from hpo.store.recorder import Recorder


@dataclass(frozen=True)
class Limits:
    """When to end an evaluation, a run in which nothing succeeds, or one that is good enough.

    `evaluation_timeout` is in seconds; `max_failures` counts failed evaluations before any success. `prunes` says that
    a pruner judges each loss, from `first_judged` on, counted from 1.
    """

    evaluation_timeout: float = math.inf
    max_failures: int | None = None
    target_loss: float = -math.inf
    prunes: bool = False
    first_judged: int = 1


def target_reached(target_loss: float) -> Stop:
    """Return the stop of a run that has reached its target loss."""
    reason = f"the loss of --target-loss {target_loss:g} is reached"
    return Stop(reason, Exit.BUDGET_SPENT, "a lower --target-loss, or --target-loss off")


def _unreported(missing: Sequence[str], metrics: Mapping[str, float]) -> str:
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
        recorder: Recorder,
        slot: TrainerSlot,
        limits: Limits,
        stop: Callable[[Stop], None],
        keeper: WeightsKeeper | None = None,
        saver: Saver | None = None,
    ) -> None:
        self.limits = limits
        self._recorder = recorder
        self._slot = slot
        self._stop = stop
        self._keeper = keeper
        self._saver = saver

    def decide(self, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Record what all ranks have said of a step, and return the final verdict: how the evaluation goes on.

        The time that this takes is not counted as the evaluation's: a pruner may wait for a database that is away.
        """
        since, seconds = clock.now(), attempt.seconds_in_all
        self._recorder.printed(attempt.assignment.number, printed)
        if verdict.loss is not None:
            self._take_over(attempt)
            self._recorder.report(attempt.assignment, len(attempt.losses) + 1, verdict.loss)
            verdict = self._decided(attempt, verdict, verdict.loss, seconds)
            keep, save = self._is_to_be_kept(attempt, verdict), self._is_to_be_saved(attempt, verdict)
            verdict = replace(verdict, keep=keep, save=save)
        attempt.began += clock.now() - since
        return verdict

    def _is_to_be_kept(self, attempt: Attempt, verdict: Verdict) -> bool:
        if self._keeper is None or not attempt.offers or verdict.state not in ("going", "complete", "paused"):
            return False
        assert verdict.loss is not None
        return verdict.loss < attempt.loss and self._keeper.wants(attempt.assignment, verdict.loss, verdict.metrics)

    def _is_to_be_saved(self, attempt: Attempt, verdict: Verdict) -> bool:
        if self._saver is None or not attempt.has_saved or verdict.state != "going":
            return verdict.save
        return self._saver.wants()

    def _take_over(self, attempt: Attempt) -> None:
        """Record the losses that an evaluation had in an earlier session, if it has gone on from there."""
        if attempt.taken_over and attempt.is_first and not attempt.has_loss:
            self._recorder.went_on(attempt.assignment, attempt.losses, attempt.seconds_before)

    def _decided(self, attempt: Attempt, verdict: Verdict, loss: float, seconds: float) -> Verdict:
        limits = self.limits
        if missing := self._recorder.objectives.missing(verdict.metrics):
            return replace(verdict, state="failed", failure=_unreported(missing, verdict.metrics))
        if loss <= limits.target_loss:
            return replace(verdict, state="complete")
        if seconds > limits.evaluation_timeout:
            reason = f"{TIMEOUT}still going on after {limits.evaluation_timeout:g} s (--evaluation-timeout)"
            return replace(verdict, state="failed", failure=reason)
        is_judged = limits.prunes and len(attempt.losses) + 1 >= limits.first_judged
        return self._judged(attempt, verdict) if is_judged else verdict

    def _judged(self, attempt: Attempt, verdict: Verdict) -> Verdict:
        """Let the pruner judge an evaluation; one that does not save cannot pause."""
        assert verdict.loss is not None
        is_lowest = verdict.loss < attempt.loss
        loss, metrics = (verdict.loss, verdict.metrics) if is_lowest else (attempt.loss, attempt.metrics)
        judgement = self._recorder.judge(attempt.assignment, len(attempt.losses) + 1, loss, metrics)
        if judgement.state != "paused":
            return replace(verdict, state=judgement.state)
        can_pause = self.can_go_on_elsewhere(attempt)
        return replace(verdict, state="paused" if can_pause else "pruned", save=can_pause and judgement.may_go_on)

    def can_go_on_elsewhere(self, attempt: Attempt) -> bool:
        """Tell whether the objective has saved with this loss what it goes on from."""
        return attempt.saves_itself or (self._saver is not None and self._saver.is_on and attempt.has_saved)

    def can_hand_on(self, attempt: Attempt) -> bool:
        """Tell whether the objective has saved with this loss what can be handed on to other workers."""
        return self._saver is not None and self._saver.can_copy and self.can_go_on_elsewhere(attempt)

    def about(self, attempt: Attempt) -> dict[str, Any]:
        """Return what a state says of its evaluation."""
        return {
            "losses": list(attempt.losses),
            "metrics": dict(attempt.metrics),
            "seconds": attempt.seconds_in_all,
        }

    def draft(self, attempt: Attempt) -> str:
        """Return where the trainer is to write the state of this loss; empty if it is not to be written now."""
        if self._saver is None or attempt.verdict.state == "paused":
            return ""
        is_due = attempt.verdict.state == "regrouped" or self._saver.is_due()
        return self._saver.draft(attempt) if is_due else ""

    def take_kept(self, attempt: Attempt, verdict: Verdict, kept: Mapping[str, Any], since: float) -> None:
        """Learn what the trainer has kept of a loss, which it has done since a time."""
        for text in kept["warnings"]:
            warn(f"warning: {text}")
        if verdict.keep:
            attempt.has_weights = bool(kept["has_weights"])
        if self._saver is not None and verdict.save and (losses := self._saver.take_kept(attempt, kept, since)):
            self._recorder.saved(attempt.assignment, losses)

    def keep_drafts(self, attempt: Attempt, verdict: Verdict, names: tuple[str, str], since: float) -> None:
        """Keep the drafts of a program's loss that are wanted, its checkpoint and its weights; drop the others."""
        drafts, (checkpoint, weights) = attempt.drafts, names
        assert drafts is not None
        attempt.has_weights = drafts.take_weights(weights) if verdict.keep else attempt.has_weights
        if not verdict.keep:
            drafts.drop(weights)
        kept: dict[str, Any] = {"warnings": [], "has_weights": attempt.has_weights}
        if not verdict.save:
            drafts.drop(checkpoint)
        elif checkpoint and drafts.take_checkpoint(checkpoint, self.about(attempt), attempt.has_weights):
            if draft := self.draft(attempt):
                kept["written"] = drafts.write_state(draft)
            self.take_kept(attempt, verdict, kept, since)

    def lose_kept(self, attempt: Attempt, verdict: Verdict, reason: str) -> None:
        """Warn that weights of a loss are lost, since the trainer has ended, and remove the draft of a state."""
        attempt.has_weights &= not verdict.keep
        if verdict.keep and (verdict.is_last or verdict.state == "complete"):  # otherwise the evaluation fails
            warn(f"warning: trial {attempt.assignment.number} keeps no weights of its best loss: {reason}")
        if self._saver is not None:
            self._saver.drop_draft(attempt)

    def find_losses(self, assignment: Assignment) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that this evaluation repeats; none for a first attempt."""
        return self._recorder.losses_before(assignment.number) if assignment.number != assignment.root else ([], 0.0)

    def miss_loss(self, reason: str, remedy: str) -> None:
        """Stop the run if no evaluation has found a loss so far: the others would not find one without the remedy."""
        if not self._recorder.has_losses():
            self._stop(Stop(reason, Exit.NOTHING_SUCCEEDED, remedy))

    def warn_once(self, attempt: Attempt, text: str) -> None:
        """Warn of something in an evaluation, unless the run has warned of it before."""
        if self._recorder.is_first(text):
            warn(f"warning: trial {attempt.assignment.number}: {text}")

    def find(self, assignment: Assignment) -> tuple[Path | None, bool]:
        """Begin an evaluation, and return the file of its own state, or of what it inherits, and whether it is its own.

        The file is None where it begins anew.
        """
        if self._saver is None:
            return None, True
        self._saver.begin()
        if (own := self._saver.find(assignment)) or assignment.parent is None:
            return own, True
        try:
            return self._saver.parents(assignment.parent), False
        except ValueError as error:
            self._disinherit(assignment, str(error))
            return None, True

    def reject(self, assignment: Assignment, reason: str, is_own: bool) -> None:
        """Let an evaluation begin anew, since it cannot go on from its state, or from what it was to inherit."""
        if self._saver is not None and is_own:
            self._saver.reject(assignment, reason)
        elif not is_own:
            self._disinherit(assignment, reason)

    def write_state(self, attempt: Attempt) -> None:
        """Let the trainer write the last state of an evaluation that ends here, and is to go on."""
        if self._saver is None or not attempt.copied_after:
            return
        copies = self._copies(attempt)
        if copies is not None and (losses := self._saver.write(attempt, copies)):
            self._recorder.saved(attempt.assignment, losses)

    def _copies(self, attempt: Attempt) -> Copies | None:
        """Return what holds the last state and the weights of an evaluation; None if its trainer has ended."""
        if attempt.drafts is not None:
            return attempt.drafts
        return self._slot.trainer if self._slot.is_ready else None

    def finish(self, attempt: Attempt, seconds: float) -> None:
        """Record how an evaluation has ended; stop the run where it has reached its target, or seems to be in vain."""
        assignment, verdict = attempt.assignment, attempt.verdict
        if verdict.state == "stopped":
            self.write_state(attempt)
            self._recorder.interrupt(assignment)
            return
        self._take_over(attempt)
        if assignment.parent is not None and not attempt.has_inherited and not attempt.taken_over:
            self._disinherit(
                assignment, "the objective has not asked for worker.parent_checkpoint" if attempt.losses else ""
            )
        bequeaths = verdict.state == "complete" and self._bequeaths(attempt)
        if verdict.save or bequeaths:
            self.write_state(attempt)
        self._end(attempt, seconds)
        if self._saver is not None and bequeaths:
            self._recorder.make_room(assignment.number)
        elif self._saver is not None and not verdict.save and self._saver.has_written(assignment):
            self._recorder.settle()  # a death in between would cost both its end and its state
            self._saver.discard(assignment)

    def _disinherit(self, assignment: Assignment, reason: str) -> None:
        """Record that an evaluation has begun without what it was to inherit, and say why, if there is a reason."""
        self._recorder.disinherit(assignment)
        if self._saver is not None and reason:
            text = f"trial {assignment.number} begins without what trial {assignment.parent} has learned: {reason}"
            self._saver.warn_once("inherited", text)

    def _bequeaths(self, attempt: Attempt) -> bool:
        """Tell whether others may inherit from an evaluation that is complete: it has saved, and is among the best."""
        saver, number = self._saver, attempt.assignment.number
        if saver is None or not saver.islands:
            return False
        if not saver.has_last_state(attempt, self._recorder.checkpoint_step(number)):
            text = f"nothing can be inherited from trial {number}: it has not saved what it is at its end"
            saver.warn_once("bequeathed", f"{text} (worker.save_checkpoint, before its last loss)")
            return False
        return self._recorder.bequeaths(number, attempt.loss)

    def _end(self, attempt: Attempt, seconds: float) -> None:
        assignment, verdict, record = attempt.assignment, attempt.verdict, self._recorder
        if verdict.state == "complete":
            is_cut = attempt.loss <= self.limits.target_loss and not verdict.is_last
            cut = {"cut_after": len(attempt.losses)} if is_cut else {}
            record.complete(assignment, attempt.loss, seconds, attempt.metrics, **cut)
            copies = self._copies(attempt)
            if self._keeper and attempt.has_weights and copies is not None:
                self._keeper.keep(assignment, copies)
            if attempt.loss <= self.limits.target_loss:
                self._stop(target_reached(self.limits.target_loss))
        elif verdict.state in ("pruned", "paused"):
            paused = {"paused_after": len(attempt.losses)} if verdict.state == "paused" else {}
            record.prune(assignment, attempt.loss, seconds, attempt.metrics, **paused)
        else:
            record.fail(assignment, verdict.failure, verdict.traceback, seconds)
            most = self.limits.max_failures
            if most is not None and record.failures_before_any_success() >= most:
                reason = f"{most} evaluations failed and none succeeded (--max-failures)"
                self._stop(Stop(reason, Exit.NOTHING_SUCCEEDED))
