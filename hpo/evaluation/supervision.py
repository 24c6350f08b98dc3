"""Supervise an objective on one rank of a worker: wait for its trainer, cancel it, and agree on verdicts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.hang_detector import HangDetector
from hpo.evaluation.leader import Leader
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.step_sync import StepSync, describe_timeout
from hpo.evaluation.step_verdict import NOT_JOINED, Step, Verdict
from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.failure import format_stack
from hpo.process.user_frames import UserFrames
from hpo.ranks.rank_watch import RUN_STOPS
from hpo.ranks.watched_evaluation import WatchedEvaluation

_SECONDS_TO_ACKNOWLEDGE = 1.0  # time to acknowledge a cancellation, which native code does not
_SECONDS_TO_CLEAN_UP = 5.0  # time for `finally` blocks of a cancelled objective
POLL_SECONDS = 0.5
# A trainer's own limit to connect is 5 minutes, but NCCL's start has none. Another 30 s are for memory to become free.
SECONDS_TO_JOIN = 340.0
_STEP_FIELDS = tuple(Step.__dataclass_fields__)


class Supervision:
    """Supervises one evaluation on one rank.

    On the leader, `overdue_after` is the maximum time of the evaluation in seconds. On other ranks
    it is infinite.
    """

    _poll_seconds = POLL_SECONDS

    def __init__(  # noqa: PLR0913 - all arguments are bound once, before an evaluation starts
        self,
        group: RankGroup,
        watched: WatchedEvaluation,
        step_sync: StepSync,
        attempt: Attempt,
        leader: Leader | None,
        user_frames: UserFrames,
        overdue_after: float,
    ) -> None:
        self._group = group
        self._watched = watched
        self._step_sync = step_sync
        self._attempt = attempt
        self._leader = leader
        self._user_frames = user_frames
        self._overdue_after = overdue_after
        self._trainer: TrainerClient = group.trainer
        self._frames: Sequence[FrameSummary] = ()  # stack of the objective when it was cancelled
        self._cancelled_at = self._interrupt_at = self._kill_at = math.inf
        self.is_clean = self._is_watched = False
        self._has_joined = self._has_ended = False
        self._must_join_by = math.inf
        self.remains = ""  # describes memory that the evaluation has left on the GPU
        self._lost_seconds = clock.measure_lost()
        self.trace: dict[str, Any] = {}

    def start_objective(self, ticket: dict[str, Any] | None, seed: int, folder: Path, is_watched: bool) -> None:
        """Let the trainer start the objective, after it has joined the process group of `ticket`, if that is given."""
        attempt, path = self._attempt, str(self._attempt.path) if self._attempt.path else None
        self._is_watched = is_watched
        self._trainer.send(
            "evaluate",
            params=attempt.assignment.params,
            seed=seed,
            trial=attempt.assignment.root,
            folder=str(folder),
            ticket=ticket,
            free_memory=self._group.slot.first_free_memory,
            restored=path if attempt.checkpoint_info is not None else None,
            inherited=path if attempt.parent_info is not None else None,
            is_watched=is_watched,
            is_compared=self._group.compares_collectives,
        )

    def step(self) -> None:
        """Wait for the objective's next loss, or for its end, and agree on the verdict with the other ranks."""
        step = self._receive_step("step")
        self._attempt.record_step(step)
        verdict, since = self._step_sync.agree_on_verdict(step), clock.now()
        gathers = (verdict.keep and step.gathers) or (verdict.save and step.saves)
        if gathers:
            self._send_verdict(verdict, gathers=True)
            gathered = self._step_sync.agree_on_verdict(self._receive_step("gathered"))
            if gathered.state != "complete":
                verdict = replace(gathered, loss=verdict.loss)
        is_best = verdict.loss is not None and verdict.loss < self._attempt.loss
        self._attempt.record_verdict(verdict)
        self._send_verdict(verdict, gathers=False, is_best=is_best)
        if self._leader is not None and (verdict.keep or verdict.save):
            self._await_copies(verdict, since)
        if self._attempt.has_next_step and verdict.is_last:  # The objective has returned with this loss.
            self._attempt.record_verdict(Verdict("complete", inherited=verdict.inherited))

    def end(self) -> None:
        """Wait until the objective has ended; if it was aborted, write its last checkpoint, and kill the trainer."""
        is_aborted = self._attempt.is_aborted
        if not self._has_ended:
            self._kill_at = clock.now() + (_SECONDS_TO_CLEAN_UP if is_aborted else self._group.patience)
            self._wait_for_end()
        if is_aborted:
            if self._leader is not None and self._attempt.verdict.state in ("stopped", "suspended"):
                self._leader.write_checkpoint(self._attempt)
            self._group.slot.discard_trainer()

    # Waiting for the trainer

    def _receive_step(self, kind: str) -> Step:
        """Return the objective's next step, or a failed step if its trainer has ended."""
        found = self._receive_message(kind)
        step = self._make_end_step(found) if isinstance(found, TrainerEnd) else self._make_step(found.content)
        self._trainer.read_output()
        if step.failure is not None:
            if self._watched.cause is None:
                self._watched.cancel_on_all(f"a peer failed: {step.failure}")
            self._end_failed_objective(step)
        return step

    def _receive_message(self, kind: str) -> Message | TrainerEnd:
        """Wait for a message of kind `kind`, or for the trainer's end; cancel the evaluation if necessary."""
        detector = HangDetector(self._trainer, self._group.patience + _SECONDS_TO_ACKNOWLEDGE)
        while True:
            self._enforce_limits()
            self._poll()
            now = clock.now()
            if self._watched.cause is None and detector.is_hanging(now):
                return self._make_timeout_message(detector.frames)
            until = min(self._kill_at, self._overdue_at, detector.next_check) - now
            seconds = min(max(until, 0.01), self._poll_seconds)
            found = self._trainer.wait(seconds, self._watched, *self._group.store_listeners)
            self._group.serve_store()
            if isinstance(found, TrainerEnd):
                self._has_ended = True
                return found
            if found is not None and found.kind == kind:
                return found
            if found is not None:
                self._handle_message(found)

    def _poll(self) -> None:
        """Do periodic work while this rank waits for its trainer; subclasses extend it."""

    @property
    def _overdue_at(self) -> float:
        return self._attempt.began_at + self._overdue_after

    def _enforce_limits(self) -> None:
        """Cancel the objective of a cancelled or overdue evaluation, and kill a trainer that has not ended in time."""
        if clock.now() > self._overdue_at and self._watched.cause is None:
            self._watched.cancel_on_all("timeout: no loss within --evaluation-timeout")
        if not self._trainer.has_started:  # It may import the search file first.
            self._must_join_by = clock.now() + max(SECONDS_TO_JOIN, self._group.patience)
        if not self._has_joined and clock.now() > self._must_join_by and self._watched.cause is None:
            self._watched.cancel_on_all(NOT_JOINED)
        if self._watched.cause is not None and self._cancelled_at == math.inf:
            self._watched.clear_event()
            self._cancel_objective()
        if clock.now() > self._kill_at:
            self._kill_trainer()
        elif clock.now() >= self._interrupt_at:
            self._interrupt_at = clock.now() + POLL_SECONDS
            self._trainer.interrupt()

    def _handle_message(self, message: Message) -> None:
        if message.kind == "interrupted":
            self._frames = [FrameSummary(*frame) for frame in message["frames"]]
            self._kill_at, self._interrupt_at = self._cancelled_at + _SECONDS_TO_CLEAN_UP, math.inf
        elif message.kind == "seen":
            self.trace = dict(message.content)
        elif message.kind == "joined":
            self._has_joined = True
            self._attempt.began_at = clock.now()  # The time to start and connect trainers does not count.
            self._record_memory(message.content.get("free_memory", 0), message.content.get("warning", ""))

    def _record_memory(self, free: int, warning: str) -> None:
        """Record the free memory of the GPU at the start of the first evaluation; print a warning about it."""
        group = self._group
        if group.has_own_gpu and not group.slot.first_free_memory:
            group.slot.first_free_memory = free
        if warning:
            group.slot.first_free_memory = free  # Later evaluations need not wait for the rest.
            group.slot.warn_once(f"rank {group.rank} of worker {group.index}: {warning}")

    def _cancel_objective(self) -> None:
        """End the objective by an exception, which a signal raises.

        If the trainer does not react soon, for example in native code, it is killed. The signal is repeated, since the
        trainer may not have begun the evaluation. A trainer that has not joined the process group runs no objective, so
        it is killed at once.
        """
        self._cancelled_at = self._interrupt_at = self._kill_at = clock.now()
        if self._has_joined:
            # On busy cores, a program needs more than a second to end and to send its trace.
            is_patient = self._is_watched or self._watched.cause == RUN_STOPS
            self._kill_at += _SECONDS_TO_CLEAN_UP if is_patient else _SECONDS_TO_ACKNOWLEDGE

    def _kill_trainer(self) -> None:
        """Kill a trainer that has not ended after its cancellation. Record where it is, unless it sent that."""
        if not self._frames and not self._trainer.is_killed:
            self._frames = self._trainer.find_stack()
        self._trainer.kill()

    def _make_timeout_message(self, frames: Sequence[FrameSummary]) -> Message:
        """Interrupt an objective that hangs in a collective (see `HangDetector`); return a message with its timeout."""
        self._cancelled_at = clock.now()  # The signal takes effect when its peers have ended, which ends its wait.
        self._trainer.interrupt()
        content = {
            "failure": describe_timeout(self._group.patience),
            "gave_up": True,
            "seconds": self._group.patience,
            "at": time.time(),
            "place": self._user_frames.find_position(frames),
            "traceback": format_stack(frames),
        }
        return Message("step", content)

    def _make_step(self, content: Any) -> Step:
        if "is_clean" in content:  # The objective has returned with this step.
            self._record_end(content)
        values = {name: value for name, value in content.items() if name in _STEP_FIELDS}
        if content.get("is_status"):
            values["failure"] += self._trainer.describe_last_error()
        step = Step(**{**values, "rank": self._group.rank})
        if step.failure is None:
            return step
        gave_up, cause = bool(content.get("gave_up")), self._watched.cause
        timeout = gave_up and content["seconds"] >= self._group.patience
        is_cancelled = bool(content.get("is_cancelled")) and cause is not None
        if is_cancelled:
            step = replace(step, failure=cause)
        elif timeout:
            step = replace(step, failure=describe_timeout(self._group.patience))
        return replace(
            step,
            own=not is_cancelled,
            timeout=timeout,
            suspended=gave_up and clock.measure_lost() > self._lost_seconds,
            stopped=cause == RUN_STOPS,
            has_begun=self._has_joined,
        )

    def _make_end_step(self, ended: TrainerEnd) -> Step:
        """Return the failed step of a trainer that has ended by itself, or did not react to a cancellation."""
        cause, is_own = self._watched.cause, not self._trainer.is_killed
        frames = () if is_own else self._frames
        frames = frames or ended.frames
        failure = ended.text if is_own or cause is None else cause
        timeout = is_own and self._trainer.has_watchdog_aborted(ended)
        return Step(
            self._group.rank,
            failure=describe_timeout(self._group.patience) if timeout else failure,
            own=is_own,
            timeout=timeout,
            suspended=timeout and clock.measure_lost() > self._lost_seconds,
            stopped=cause == RUN_STOPS,
            orphaned=self._trainer.has_lost_template,
            has_begun=self._has_joined,
            at=time.time(),
            place=self._user_frames.find_position(frames),
            traceback=format_stack(frames),
        )

    def _end_failed_objective(self, step: Step) -> None:
        """End a failed objective, and kill its trainer, so that peers that wait for it fail at once."""
        if not self._has_ended:
            self._kill_at = min(self._cancelled_at, clock.now()) + _SECONDS_TO_CLEAN_UP
            self._wait_for_end()
        may_resume = step.stopped or clock.measure_lost() > self._lost_seconds
        if self._leader is not None and may_resume:
            self._leader.write_checkpoint(self._attempt)  # The evaluation may resume from it.
        self._group.slot.discard_trainer()

    def _wait_for_end(self) -> None:
        while not self._has_ended:
            if clock.now() > self._kill_at:
                self._trainer.kill()
            found = self._trainer.wait(min(max(self._kill_at - clock.now(), 0.01), POLL_SECONDS))
            if isinstance(found, TrainerEnd):
                self._has_ended = True
            elif found is not None and found.kind == "ended":
                self._record_end(found.content)
            elif found is not None:
                self._handle_message(found)

    def _record_end(self, content: Mapping[str, Any]) -> None:
        self._has_ended, self.is_clean = True, bool(content["is_clean"])
        self.remains = content.get("remains", "")

    # Messages to the trainer

    def _send_verdict(self, verdict: Verdict, gathers: bool, is_best: bool = False) -> None:
        """Send a verdict to the trainer.

        No message is needed if the objective has ended and no weights or checkpoint of its latest loss are kept.
        """
        if self._has_ended and (self._leader is None or not (verdict.keep or verdict.save)):
            return
        attempt, leader, continues = self._attempt, self._leader, verdict.state in ("going", "paused")
        saves = leader is not None and verdict.save and not gathers and continues
        self._trainer.send(
            "verdict",
            goes_on=verdict.state == "going" and not verdict.is_last,
            has_loss=verdict.loss is not None,
            is_best=is_best,
            gathers=gathers,
            keep=verdict.keep,
            save=verdict.save if gathers else saves,
            about=leader.describe_checkpoint(attempt) if saves and leader else None,
            draft=leader.make_draft_path(attempt) if saves and leader else "",
        )

    def _await_copies(self, verdict: Verdict, since: float) -> None:
        found = self._receive_message("kept")
        if self._leader is None:
            return
        if isinstance(found, Message):
            self._leader.record_copies(self._attempt, verdict, found.content, since)
        else:
            self._leader.record_lost_copies(self._attempt, verdict, found.text)
