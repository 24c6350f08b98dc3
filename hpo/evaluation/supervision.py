"""Supervise an evaluation on one rank: wait for its trainer, cancel it, and agree on the verdict.

Until the objective has ended on all ranks, only the leader decides, on each report. The ranks agree
once, at the end:

1. Each rank learns how its objective has ended: it has returned, it has failed, or its trainer has
   crashed. A rank whose objective has failed first cancels the evaluation on all ranks, so that its
   peers do not wait for it.
2. The ranks gather their ends, without blocking: the leader still receives reports and copies, and
   cancels peers that do not end in time.
3. The leader finds the first cause, and broadcasts the verdict.
4. Each rank waits until its trainer is idle, or kills it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from traceback import FrameSummary
from typing import Any, ClassVar

from hpo.errors import RunError
from hpo.evaluation.attempt import Attempt, EvaluationContext
from hpo.evaluation.draft_store import Draft
from hpo.evaluation.leader import Leader
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd
from hpo.evaluation.verdict import (
    NOT_JOINED,
    TIMEOUT_PREFIX,
    FailureKind,
    RankEnd,
    State,
    Verdict,
    judge_ends,
)
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.failure import format_stack
from hpo.process.messages import EvaluationRequest, GroupTicket, ObjectiveEnd, Report, ReportAnswer
from hpo.process.user_frames import are_in_collective, may_wait_for_ranks
from hpo.ranks.communicator import sleep_until
from hpo.ranks.rank_watch import RUN_STOPS, WatchedEvaluation

_SECONDS_TO_ACKNOWLEDGE = 1.0  # time to acknowledge a cancellation, which native code does not
_SECONDS_TO_CLEAN_UP = 5.0  # time for `finally` blocks of a cancelled objective
_SECONDS_TO_END_TRAINER = 30.0  # time in which a supervisor can end its trainer on busy cores
_SECONDS_TO_RECEIVE_NEWS = 5.0
_SECONDS_BETWEEN_LOGS = 5.0  # time after which printed lines are logged if no report is
_POLL_SECONDS = 0.5
# A trainer's own limit to connect is 5 minutes, but NCCL's start has none. Another 30 s are for
# memory to become free.
SECONDS_TO_JOIN = 340.0
_CHECKS_PER_WAIT = 4
_SECONDS_TO_FIRST_READING = 1.0  # of the CPU time of an objective; many report sooner
# CPU time between two checks in hundredths of a second; to write the stacks takes this much.
_MAX_IDLE_TICKS = 2


@dataclass(frozen=True)
class RankNews:
    """The news of one rank, for the leader."""

    rank: int
    printed: str = ""
    """Lines that the rank has printed."""
    reports: Sequence[Report] = ()
    """New reports of a program."""
    first: int = 0
    """Number of earlier reports."""


class _Phase(Enum):
    """The phase of an evaluation in the trainer of this rank."""

    CONNECTING = "connecting"  # It starts, and joins the process group.
    RUNNING = "running"  # It runs the objective, and then restores its own state.
    ENDED = "ended"  # It is idle, or has ended.


@dataclass
class Supervision:
    """Supervises one evaluation of an objective function on one rank.

    The trainers of all ranks agree on each report. Only the trainer of the leader sends it, and
    waits for the answer. `ProgramSupervision` changes this for programs.
    """

    _context: EvaluationContext
    _group: RankGroup
    _watched: WatchedEvaluation
    _attempt: Attempt
    _leader: Leader | None

    _poll_seconds: ClassVar[float] = _POLL_SECONDS

    def __post_init__(self) -> None:
        # An overdue objective gets time to reach its next loss, and ends there.
        self._seconds_to_next_loss = self._group.patience
        # At the end, trainers have agreed, and only have to gather what the objective has offered.
        self._seconds_for_peers = self._group.patience + _SECONDS_TO_ACKNOWLEDGE
        # The verdict that requires copies of weights or a checkpoint, and the time since when.
        self._awaited: tuple[Verdict, float] | None = None
        self._user_frames = self._context.user_frames
        self.trace: dict[str, Any] = {}  # of the training, if `context.is_traced`
        # The trainer of this rank.
        self._trainer: TrainerClient = self._group.trainer
        self._phase = _Phase.CONNECTING
        self._join_by = math.inf
        self._cancellation: Cancellation | None = None
        self._is_clean = False  # whether the trainer can be reused
        self._lost_seconds = clock.measure_lost()
        # The news of this rank, or of all ranks on the leader.
        self._news_count = 0  # messages that were sent to the leader, or received by it
        self._printed = ""  # lines of other ranks that are not logged yet
        self._log_at = clock.now() + _SECONDS_BETWEEN_LOGS

    def start_objective(self, ticket: GroupTicket | None, values: Mapping[str, Any]) -> None:
        """Let the trainer join a process group, unless it is in its group, and start the objective.

        `values` are those of `EvaluationContext.describe_evaluation`.
        """
        attempt = self._attempt
        start = attempt.start
        path = str(start.path) if start.path else None
        request = EvaluationRequest(
            attempt.assignment.params,
            values["seed"],
            attempt.assignment.root,
            str(values["folder"]),
            ticket,
            free_memory=self._group.slot.first_free_memory,
            checkpoint=path if start.is_own else None,
            parent_checkpoint=None if start.is_own else path,
            is_traced=self._context.is_traced,
            is_compared=self._group.compares_collectives,
        )
        self._trainer.send("evaluate", **request.encode())

    def supervise(self) -> None:
        """Wait for the end of the evaluation, agree on the verdict, and end the trainer if needed.

        Collective: call on all ranks of the worker.
        """
        end = self._receive_end()
        ends = self._gather_ends(end)
        verdict = None
        if self._leader is not None:
            self._attempt.record_ends(ends)
            verdict = self._conclude(self._leader, ends)
            verdict = self._leader.decide_on_repetition(self._attempt, verdict)
        self._attempt.record_verdict(self._group.comm.bcast(verdict))
        self._finish(end)

    # Reports

    def _poll(self) -> None:
        """Exchange news with the other ranks: reports of programs, and printed lines."""
        self._watched.clear_event()
        is_log_due = clock.now() > self._log_at
        if is_log_due:
            self._log_at = clock.now() + _SECONDS_BETWEEN_LOGS
        if self._leader is None:
            news = self._take_news()
            if news.reports or is_log_due:
                news = replace(news, printed=self._group.slot.output.take_printed())
            if news.reports or news.printed:
                self._watched.send_news(news)
                self._news_count += 1
            return
        others: list[RankNews] = self._watched.take_news()
        self._news_count += len(others)
        self._printed += "".join(news.printed for news in others)
        # A rank reports a loss only after the leader has reported the loss before, so the leader's
        # are handled first.
        for news in [self._take_news(), *others]:
            self._process_reports(news)
        if is_log_due:
            self._leader.log_output(self._attempt, self._take_printed())
        # Twice the limit of a collective, so that a collective which waits for a peer fails first,
        # and names the peer.
        limit = 2 * self._group.patience
        is_late = self._awaited is not None and clock.now() > self._awaited[1] + limit
        if is_late and self._watched.cause is None:
            self._watched.cancel_on_all(
                f"{TIMEOUT_PREFIX}an offered function has not returned after {limit:g} s"
            )

    def _take_news(self) -> RankNews:
        """Return the new reports of this rank; only programs have any."""
        return RankNews(self._group.rank)

    def _process_reports(self, news: RankNews) -> None:
        """Process the reports of a rank, on the leader."""

    def _decide(self, leader: Leader, report: Report) -> Verdict:
        """Let the leader decide on a report, and record the verdict."""
        verdict = leader.decide(self._attempt, report, self._take_printed())
        self._attempt.record_verdict(verdict)
        return verdict

    def _take_printed(self) -> str:
        """Return the lines of all ranks that are not logged yet, on the leader."""
        printed = self._group.slot.output.take_printed() + self._printed
        self._printed = ""
        return printed

    # The end of the evaluation

    def _receive_end(self) -> RankEnd:
        """Wait for the end of the objective on this rank. If it failed, cancel it on all ranks."""
        found = self._wait_for_objective()
        if isinstance(found, TrainerEnd):
            end = self._describe_crash(found)
        else:
            end = self._make_end(found)
        if isinstance(found, TrainerEnd) or found.ends_trainer:
            self._phase = _Phase.ENDED
        self._trainer.read_output()
        if end.failure is not None:
            if self._watched.cause is None:
                self._watched.cancel_on_all(f"a peer failed: {end.failure}")
            # The trainer is killed soon, so that peers that wait for it fail.
            began = clock.now() if self._cancellation is None else self._cancellation.began_at
            self._wait_for_idle(began + _SECONDS_TO_CLEAN_UP)
            self._group.slot.discard_trainer()
        return end

    def _gather_ends(self, end: RankEnd) -> Sequence[RankEnd]:
        """Wait for the end on the other ranks, in whatever order, and return the ends of all ranks.

        News come through another thread and another communicator than the ends. So each end has the
        number of news that its rank has sent, and the leader waits for them: a late report must not
        miss the verdict.
        """
        self._poll()
        printed = self._group.slot.output.take_printed()
        count = 0 if self._leader else self._news_count
        end = self._complete_end(replace(end, printed=printed, news_count=count))
        gathering = self._group.comm.begin_gather(end)
        since = clock.now()

        def is_gathered() -> bool:
            self._poll()
            if gathering.is_done():
                return True
            # The others may have to wait until the leader has written a checkpoint.
            if self._leader is not None:
                self._limit_wait_for_peers(since)
            return False

        sleep_until(is_gathered)
        ends: list[RankEnd] = gathering.unpack_objects()

        def has_all_news() -> bool:
            self._poll()
            return self._news_count >= sum(end.news_count for end in ends)

        if self._leader is not None:
            sleep_until(has_all_news, _SECONDS_TO_RECEIVE_NEWS)
        return ends

    def _complete_end(self, end: RankEnd) -> RankEnd:
        """Add to the end of this rank what only a program has."""
        return end

    def _limit_wait_for_peers(self, since: float) -> None:
        """Cancel the evaluation if peers have not ended in time after `since`.

        Raises:
            RunError: A peer does not answer, long after the evaluation was cancelled.
        """
        now = clock.now()
        patience = self._group.patience
        if self._watched.cause is not None:
            # The leader may have been busy since the cancellation, for example with a slow storage.
            seconds = now - max(self._watched.cancelled_at, since)
            if seconds > patience + _SECONDS_TO_END_TRAINER:
                peers = self._watched.peers
                raise RunError(
                    f"{peers.own_name} gets no answer from {peers.names}: their evaluation was "
                    f"cancelled over {seconds:.0f} s ago, and one of them has ended"
                )
        elif now > self._overdue_at:
            self._watched.cancel_on_all(
                f"{TIMEOUT_PREFIX}it ran for longer than --evaluation-timeout"
            )
        elif now > since + self._seconds_for_peers:
            waited = _describe_timeout(patience)
            self._watched.cancel_on_all(f"{TIMEOUT_PREFIX}rank 0 {waited} at its end")

    def _conclude(self, leader: Leader, ends: Sequence[RankEnd]) -> Verdict:
        """Return the final verdict, on the leader.

        A verdict on a report comes before the end that followed it: for example, a pruned script
        fails, since it is cancelled.
        """
        attempt = self._attempt
        cause = self._watched.cause or ""
        verdict = judge_ends(ends)
        # A function that the objective has offered may fail after the verdict on its loss.
        has_failed_offer = any(end.is_offer for end in ends)
        has_decided = attempt.verdict.ends_evaluation and not has_failed_offer
        if has_decided and verdict.state != State.STOPPED:
            verdict = attempt.verdict.conclude()
        elif verdict.state == State.COMPLETE and cause.startswith(TIMEOUT_PREFIX):
            # The objective has caught the exception.
            verdict = Verdict(State.FAILED, failure=cause)
        leader.log_output(attempt, self._take_printed() + "".join(end.printed for end in ends))
        return verdict

    def _finish(self, end: RankEnd) -> None:
        """Wait until the trainer is idle, and keep it if it can be reused.

        If the evaluation was aborted, the trainer is killed. If it is repeated, its last checkpoint
        is written, so that it resumes from there.
        """
        attempt = self._attempt
        seconds = _SECONDS_TO_CLEAN_UP if attempt.is_aborted else self._group.patience
        self._wait_for_idle(clock.now() + seconds)
        if self._leader is not None and attempt.verdict.state == State.REPEATED:
            self._leader.commit_checkpoint(attempt)
        if attempt.is_aborted:
            self._group.slot.discard_trainer()
        else:
            self._group.slot.finish_evaluation(self._is_clean)
        is_complete = attempt.verdict.state == State.COMPLETE
        if self._awaited is not None and self._leader is not None and is_complete:
            reason = end.failure or "they were not copied in time"
            self._leader.warn_about_lost_weights(attempt, self._awaited[0], reason)

    # Waiting for the trainer

    def _wait_for_objective(self) -> ObjectiveEnd | TrainerEnd:
        """Wait for the end of the objective or of the trainer; cancel the evaluation if needed."""
        self._watch_for_hang()
        while True:
            self._enforce_limits()
            self._poll()
            if self._watched.cause is None and self._detector.is_hanging(clock.now()):
                # The signal takes effect when its peers have ended, which ends its wait.
                self._trainer.interrupt()
                frames = self._detector.frames
                return ObjectiveEnd(
                    failure=_describe_timeout(self._group.patience),
                    gave_up=True,
                    seconds=self._group.patience,
                    at=time.time(),
                    place=self._user_frames.find_position(frames),
                    traceback=format_stack(frames),
                )
            # Wait until the next check of limits is due.
            until = min(self._overdue_at, self._detector.next_check)
            if self._cancellation is not None:
                until = min(until, self._cancellation.kill_at)
                if self._phase == _Phase.CONNECTING:
                    until = clock.now()  # Its message has arrived, or it is killed.
            seconds = min(max(until - clock.now(), 0.01), self._poll_seconds)
            found = self._trainer.wait(seconds, self._watched, *self._group.store_listeners)
            self._group.serve_store()
            if isinstance(found, TrainerEnd):
                return found
            if found is not None and found.kind == "end":
                return ObjectiveEnd(**found.content)
            if found is not None:
                self._handle_message(found)

    def _watch_for_hang(self) -> None:
        """Begin to watch whether the objective hangs: at its start, and after each report."""
        self._detector = HangDetector(self._trainer, self._group.patience + _SECONDS_TO_ACKNOWLEDGE)

    @property
    def _overdue_at(self) -> float:
        if self._leader is None:
            return math.inf
        timeout = self._leader.limits.evaluation_timeout
        return self._attempt.began_at + timeout + self._seconds_to_next_loss

    def _enforce_limits(self) -> None:
        """Cancel an overdue evaluation, and end the objective of a cancelled evaluation."""
        now = clock.now()
        watched = self._watched
        if not self._trainer.has_started:  # It may import the search file first.
            self._join_by = now + max(SECONDS_TO_JOIN, self._group.patience)
        if watched.cause is None and now > self._overdue_at:
            watched.cancel_on_all("timeout: not finished within --evaluation-timeout")
        is_connecting = self._phase == _Phase.CONNECTING
        if watched.cause is None and is_connecting and now > self._join_by:
            watched.cancel_on_all(NOT_JOINED)
        if watched.cause is None:
            return
        if self._cancellation is None:
            # On busy cores, a program needs more than a second to end and to send its trace.
            is_patient = self._context.is_traced or watched.cause == RUN_STOPS
            seconds = _SECONDS_TO_CLEAN_UP if is_patient else _SECONDS_TO_ACKNOWLEDGE
            self._cancellation = Cancellation(self._trainer, seconds)
            if is_connecting:
                return  # It may have sent before the cancellation that it has joined.
        if is_connecting:
            self._trainer.kill()  # It runs no objective.
        else:
            self._cancellation.advance()

    def _wait_for_idle(self, deadline: float) -> None:
        """Wait until the trainer is idle or has ended, and kill it at `deadline`."""
        while self._phase != _Phase.ENDED:
            if clock.now() > deadline:
                self._trainer.kill()
            found = self._trainer.wait(min(max(deadline - clock.now(), 0.01), _POLL_SECONDS))
            if isinstance(found, TrainerEnd):
                self._phase = _Phase.ENDED
            elif found is not None:
                self._handle_message(found)

    def _handle_message(self, message: Message) -> None:
        if message.kind == "joined":
            self._phase = _Phase.RUNNING
            # The time to start and connect trainers does not count.
            self._attempt.began_at = clock.now()
            self._record_memory(message.get("free_memory", 0), message.get("warning", ""))
        elif message.kind == "interrupted" and self._cancellation is not None:
            self._cancellation.acknowledge([FrameSummary(*frame) for frame in message["frames"]])
        elif message.kind == "seen":
            self.trace = dict(message.content)
        elif message.kind == "idle":
            self._phase = _Phase.ENDED
            self._is_clean = bool(message["is_clean"])
            if self._leader is not None and (remains := message.get("remains")):
                text = f"it leaves GPU memory behind, so its trainers are replaced: {remains}"
                self._leader.warn_once(self._attempt.assignment, text, "remains")
        elif message.kind == "report" and self._leader is not None:
            self._watch_for_hang()
            self._answer_report(self._leader, Report(**message.content))
        elif message.kind == "reported":
            self._watch_for_hang()
        elif message.kind == "kept" and self._leader is not None and self._awaited is not None:
            verdict, since = self._awaited
            self._awaited = None
            drafts = map(Draft.from_descriptor, message.descriptors)
            copies = dict(zip(message["kinds"], drafts, strict=True))
            errors = message["errors"]
            self._leader.warn_about_copies(
                self._attempt, errors.get("weights", ""), errors.get("checkpoint", "")
            )
            self._leader.keep_drafts(
                self._attempt, verdict, copies.get("checkpoint"), copies.get("weights"), since
            )

    def _answer_report(self, leader: Leader, report: Report) -> None:
        """Decide on a report, and send the trainer the answer, with what it must copy."""
        verdict = self._decide(leader, report)
        if verdict.keep or verdict.save:
            self._awaited = verdict, clock.now()
        answer = ReportAnswer(not verdict.ends_evaluation, verdict.keep, verdict.save)
        self._trainer.send("answer", **vars(answer))

    def _record_memory(self, free: int, warning: str) -> None:
        """Record the free memory of the GPU at the first evaluation, and print a warning."""
        group = self._group
        is_first = group.has_own_gpu and not group.slot.first_free_memory
        if is_first or warning:  # After a warning, later evaluations need not wait for the rest.
            group.slot.first_free_memory = free
        if warning:
            group.slot.warn_once(f"rank {group.rank} of worker {group.index}: {warning}")

    # How the objective has ended

    def _make_end(self, end: ObjectiveEnd) -> RankEnd:
        """Add to the end that the trainer has described what this rank knows."""
        if end.failure is None:
            return RankEnd(self._group.rank, **vars(end))
        if end.is_status:
            end = replace(end, failure=end.failure + self._trainer.describe_last_error())
        kind = FailureKind.OWN
        if end.is_cancelled and self._watched.cause is not None:
            kind = FailureKind.CANCELLED
        elif end.gave_up and self._was_suspended:
            kind = FailureKind.SUSPENDED
        elif end.gave_up and end.seconds >= self._group.patience:
            kind = FailureKind.TIMEOUT
        return self._make_failed_end(end, kind)

    def _describe_crash(self, ended: TrainerEnd) -> RankEnd:
        """Return the end of a trainer that has ended by itself, or was killed."""
        is_killed = self._trainer.is_killed
        cancelled_frames = self._cancellation.frames if self._cancellation and is_killed else ()
        frames = cancelled_frames or ended.frames
        end = ObjectiveEnd(
            failure=ended.text,
            echo=is_killed and are_in_collective(frames),
            at=time.time(),
            place=self._user_frames.find_position(frames),
            traceback=format_stack(frames),
        )
        kind = FailureKind.OWN
        if self._trainer.has_lost_template:
            kind = FailureKind.ORPHANED
        elif is_killed:
            kind = FailureKind.CANCELLED
        elif self._trainer.has_watchdog_aborted(ended):
            kind = FailureKind.SUSPENDED if self._was_suspended else FailureKind.TIMEOUT
        return self._make_failed_end(end, kind)

    def _make_failed_end(self, end: ObjectiveEnd, kind: FailureKind) -> RankEnd:
        """Complete the end of an objective that has failed."""
        cause = self._watched.cause
        failure = end.failure
        if kind == FailureKind.CANCELLED:
            failure = cause or failure
        elif kind == FailureKind.TIMEOUT:
            failure = _describe_timeout(self._group.patience)
        return RankEnd(
            self._group.rank,
            **{**vars(end), "failure": failure},
            kind=FailureKind.STOPPED if cause == RUN_STOPS else kind,
            has_begun=self._phase != _Phase.CONNECTING,
        )

    @property
    def _was_suspended(self) -> bool:
        """Whether this process was stopped during the evaluation."""
        return clock.measure_lost() > self._lost_seconds


def _describe_timeout(patience: float) -> str:
    """Return the failure of a rank that has waited for its peers for `patience` seconds."""
    return f"waited {patience:g} s (--collective-timeout)"


class Cancellation:
    """The cancellation of an objective by an exception, which a signal raises in its trainer.

    If the trainer does not react soon, for example in native code, it is killed. The signal is
    repeated, since the trainer may not have begun the evaluation.

    Attributes:
        began_at: Time of the cancellation, on the clock of `hpo.process.clock`.
        kill_at: Time at which the trainer is killed, on the clock of `hpo.process.clock`.
        frames: Stack of the objective when it was cancelled; empty if it is not known.
    """

    def __init__(self, trainer: TrainerClient, seconds_to_react: float) -> None:
        self._trainer = trainer
        self.began_at = clock.now()
        self._interrupt_at = self.began_at
        self.kill_at = self.began_at + seconds_to_react
        self.frames: Sequence[FrameSummary] = ()

    def advance(self) -> None:
        """Interrupt the objective, or kill its trainer, if it is time."""
        now = clock.now()
        if now > self.kill_at:
            if not self.frames and not self._trainer.is_killed:
                self.frames = self._trainer.find_stack()
            self._trainer.kill()
        elif now >= self._interrupt_at:
            self._interrupt_at = now + _POLL_SECONDS
            self._trainer.interrupt()

    def acknowledge(self, frames: Sequence[FrameSummary]) -> None:
        """Record that the objective has been interrupted at `frames`, and let it clean up."""
        self.frames = frames
        self.kill_at = self.began_at + _SECONDS_TO_CLEAN_UP
        self._interrupt_at = math.inf


class HangDetector:
    """Checks at intervals whether an objective blocks in a collective or in a backward pass.

    The check is needed for process groups that the objective or a program creates. Their
    collectives would wait for 30 minutes, the default of torch. The default process group of a
    function has a shorter timeout.

    Only a process whose main thread sleeps and uses no CPU time is asked for its stack. A loop of
    collectives does not hang, though the stacks of two checks may be equal.
    """

    def __init__(self, trainer: TrainerClient, patience: float) -> None:
        self._trainer = trainer
        self._patience = patience
        self._interval = patience / _CHECKS_PER_WAIT
        self._since = clock.now()
        self.next_check = self._since + min(_SECONDS_TO_FIRST_READING, self._interval / 2)
        self._ticks: int | None = None
        self.frames: Sequence[FrameSummary] = ()

    def is_hanging(self, now: float) -> bool:
        """Return whether an objective has waited at one line for other ranks for too long."""
        if now < self.next_check:
            return False
        self.next_check = now + self._interval
        before = self._ticks
        is_asleep, self._ticks = self._trainer.read_thread_state()
        if before is None:
            return False  # This was the first reading.
        used = self._ticks - before
        if not is_asleep and used <= _MAX_IDLE_TICKS:
            return False  # It waits for a core. The next check decides.
        frames = self._trainer.find_stack() if used <= _MAX_IDLE_TICKS else ()
        if not may_wait_for_ranks(frames):
            self.frames = ()
            return False
        positions = [(frame.filename, frame.lineno) for frame in frames]
        if positions != [(frame.filename, frame.lineno) for frame in self.frames]:
            self.frames = frames
            self._since = now
        return now - self._since >= self._patience
