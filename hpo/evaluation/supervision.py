"""Supervise an evaluation on one rank of a worker: wait for its trainer, cancel it, and agree on the verdict.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from hpo.errors import RunError
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.draft_store import Draft
from hpo.evaluation.leader import Leader
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd
from hpo.evaluation.verdict import NOT_JOINED, TIMEOUT_PREFIX, RankEnd, State, Verdict, judge_ends
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.failure import format_stack
from hpo.process.messages import EvaluationRequest, GroupTicket, ObjectiveEnd, Report, ReportAnswer
from hpo.process.user_frames import UserFrames, are_in_collective
from hpo.ranks.communicator import Gathering, sleep_until
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


class Supervision:
    """Supervises one evaluation on one rank. Subclasses start it, and receive its reports."""

    _poll_seconds = _POLL_SECONDS

    def __init__(
        self,
        group: RankGroup,
        watched: WatchedEvaluation,
        attempt: Attempt,
        leader: Leader | None,
        user_frames: UserFrames,
        is_traced: bool,
    ) -> None:
        self._group = group
        self._watched = watched
        self._attempt = attempt
        self._leader = leader
        self._user_frames = user_frames
        self._is_traced = is_traced
        self._trainer: TrainerClient = group.trainer
        self._frames: Sequence[FrameSummary] = ()  # stack of the objective when it was cancelled
        self._cancelled_at = self._interrupt_at = self._kill_at = math.inf
        self._has_joined = self._has_ended = False
        self._crash = ""  # describes how the trainer has ended by itself
        self._must_join_by = self._ended_at = math.inf
        self._lost_seconds = clock.measure_lost()
        self._printed = ""  # lines of other ranks that are not logged yet; on the leader
        self._news_count = 0  # messages with news that were sent to the leader, or received by it
        self._log_at = clock.now() + _SECONDS_BETWEEN_LOGS
        # The verdict on a report that ends the evaluation; on the leader.
        self._decided: Verdict | None = None
        self.is_clean = False
        self.remains = ""  # describes memory that the evaluation has left on the GPU
        self.trace: dict[str, Any] = {}

    def supervise(self) -> None:
        """Wait for the end of the evaluation, agree with the other ranks on the verdict, and end the trainer if needed.

        Collective: call on all ranks of the worker.
        """
        ends = self._gather_ends(self._receive_end())
        verdict = None
        if self._leader is not None:
            verdict = self._leader.decide_on_retry(
                self._attempt, self._conclude(self._leader, ends)
            )
        self._attempt.record_verdict(self._group.comm.bcast(verdict))
        self._finish()

    # Reports

    def _poll(self) -> None:
        """Exchange news with the other ranks: reports of programs, and printed lines."""
        self._watched.clear_event()
        others: list[RankNews] = self._watched.take_news() if self._leader is not None else []
        own = self._take_news()
        is_due = clock.now() > self._log_at
        if is_due:
            self._log_at = clock.now() + _SECONDS_BETWEEN_LOGS
        if self._leader is None:
            printed = self._group.slot.output.take_printed() if own.reports or is_due else ""
            if own.reports or printed:
                self._watched.send_news(replace(own, printed=printed))
                self._news_count += 1
            return
        self._news_count += len(others)
        self._printed += "".join(news.printed for news in others)
        # A rank reports a loss only after the leader has reported the loss before, so the leader's
        # are handled first.
        for news in [own, *others]:
            self._process_reports(news)
        if is_due:
            self._leader.log_output(self._attempt, self._take_printed())

    def _take_news(self) -> RankNews:
        """Return the new reports of this rank; only programs have any."""
        return RankNews(self._group.rank)

    def _process_reports(self, news: RankNews) -> None:
        """Process the reports of a rank, on the leader."""

    def _decide(self, leader: Leader, report: Report) -> Verdict:
        """Let the leader decide on a report, and record the verdict."""
        verdict = leader.decide(self._attempt, report, self._take_printed())
        self._attempt.record_verdict(verdict)
        if verdict.ends_evaluation:
            self._decided = verdict.complete_last()
        return verdict

    def _take_printed(self) -> str:
        """Return the lines of all ranks that are not logged yet, on the leader."""
        printed = self._group.slot.output.take_printed() + self._printed
        self._printed = ""
        return printed

    # The end of the evaluation

    def _receive_end(self) -> RankEnd:
        """Wait until the objective has ended on this rank. If it has failed, cancel the evaluation on all ranks."""
        found = self._wait_for_objective()
        end = (
            self._describe_crash(found) if isinstance(found, TrainerEnd) else self._make_end(found)
        )
        self._trainer.read_output()
        if end.failure is not None:
            if self._watched.cause is None:
                self._watched.cancel_on_all(f"a peer failed: {end.failure}")
            self._end_failed_objective()
        return end

    def _gather_ends(self, end: RankEnd) -> Sequence[RankEnd]:
        """Wait for the end on the other ranks, in whatever order, and return the ends of all ranks.

        News come through another thread and another communicator than the ends. So each end has the
        number of news that its rank has sent, and the leader waits for them: a late report must not
        miss the verdict.
        """
        self._ended_at = clock.now()
        self._poll()
        printed = self._group.slot.output.take_printed()
        count = 0 if self._leader else self._news_count
        end = self._complete_end(replace(end, printed=printed, news_count=count))
        gathering = self._group.comm.begin_gather(end)
        sleep_until(lambda: self._is_gathered(gathering))
        ends: list[RankEnd] = gathering.unpack_objects()
        if self._leader is not None:
            sleep_until(lambda: self._has_all_news(ends), _SECONDS_TO_RECEIVE_NEWS)
        return ends

    def _has_all_news(self, ends: Sequence[RankEnd]) -> bool:
        self._poll()
        return self._news_count >= sum(end.news_count for end in ends)

    def _complete_end(self, end: RankEnd) -> RankEnd:
        """Add to the end of this rank what only a program has."""
        return end

    def _is_gathered(self, gathering: Gathering) -> bool:
        """Continue to poll while this rank waits for its peers, and return whether all have ended."""
        self._poll()
        if gathering.is_done():
            return True
        # The others may have to wait until the leader has written a checkpoint.
        if self._leader is not None:
            self._limit_wait_for_peers()
        return False

    def _limit_wait_for_peers(self) -> None:
        """Cancel the evaluation if peers have not ended in time.

        Raises:
            RunError: A peer does not answer, long after the evaluation was cancelled.
        """
        now = clock.now()
        patience = self._group.patience
        if self._watched.cause is not None:
            self._cancelled_at = min(self._cancelled_at, now)
            if now > self._cancelled_at + patience + _SECONDS_TO_END_TRAINER:
                raise RunError(
                    f"{self._watched.peers.own_name} gets no answer from {self._watched.peers.names}: their "
                    f"evaluation was cancelled {now - self._cancelled_at:.0f} s ago, and one of them has ended"
                )
        elif now > self._overdue_at:
            self._watched.cancel_on_all(
                f"{TIMEOUT_PREFIX}it ran for longer than --evaluation-timeout"
            )
        elif now > self._ended_at + self._seconds_for_peers:
            self._watched.cancel_on_all(
                f"{TIMEOUT_PREFIX}rank 0 {_describe_timeout(patience)} at its end"
            )

    @property
    def _seconds_for_peers(self) -> float:
        """Maximum seconds from the end of the objective on the leader to its end on the other ranks."""
        return math.inf

    def _conclude(self, leader: Leader, ends: Sequence[RankEnd]) -> Verdict:
        """Return the final verdict, on the leader.

        A verdict on a report comes before the end that followed it: for example, a pruned objective
        fails, since it is cancelled.
        """
        attempt = self._attempt
        cause = self._watched.cause or ""
        attempt.record_ends(ends)
        verdict = judge_ends(ends)
        # A function that the objective has offered may have failed after the verdict on its loss.
        decided = None if any(end.is_offer for end in ends) else self._decided
        if decided is not None and verdict.state != State.STOPPED:
            verdict = replace(
                decided, loss=None, keep=False, save=decided.save and decided.state == State.PAUSED
            )
        elif verdict.state == State.COMPLETE and cause.startswith(TIMEOUT_PREFIX):
            # The objective has caught the exception.
            verdict = Verdict(State.FAILED, failure=cause)
        leader.log_output(attempt, self._take_printed() + "".join(end.printed for end in ends))
        return verdict

    def _finish(self) -> None:
        """Wait until the trainer is idle, or kill it if the evaluation was aborted.

        If the evaluation is repeated, write its last checkpoint, so that it resumes from there.
        """
        is_aborted = self._attempt.is_aborted
        if not self._has_ended:
            self._kill_at = clock.now() + (
                _SECONDS_TO_CLEAN_UP if is_aborted else self._group.patience
            )
            self._wait_for_end()
        if self._leader is not None and self._attempt.verdict.state in (
            State.SUSPENDED,
            State.REPEATED,
        ):
            self._leader.commit_checkpoint(self._attempt)
        if is_aborted:
            self._group.slot.discard_trainer()

    # Waiting for the trainer

    def _wait_for_objective(self) -> ObjectiveEnd | TrainerEnd:
        """Wait for the end of the objective or of the trainer; cancel the evaluation if necessary."""
        self._watch_for_hang()
        while True:
            self._enforce_limits()
            self._poll()
            now = clock.now()
            if self._watched.cause is None and self._detector.is_hanging(now):
                return self._end_hanging_objective(self._detector.frames)
            until = min(self._kill_at, self._overdue_at, self._detector.next_check) - now
            seconds = min(max(until, 0.01), self._poll_seconds)
            found = self._trainer.wait(seconds, self._watched, *self._group.store_listeners)
            self._group.serve_store()
            if isinstance(found, TrainerEnd):
                self._has_ended = True
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
        return (
            self._attempt.began_at + self._leader.limits.evaluation_timeout
            if self._leader
            else math.inf
        )

    def _enforce_limits(self) -> None:
        """Cancel the objective of a cancelled or overdue evaluation, and kill a trainer that has not ended in time."""
        if clock.now() > self._overdue_at and self._watched.cause is None:
            self._watched.cancel_on_all("timeout: no loss within --evaluation-timeout")
        if not self._trainer.has_started:  # It may import the search file first.
            self._must_join_by = clock.now() + max(SECONDS_TO_JOIN, self._group.patience)
        if (
            not self._has_joined
            and clock.now() > self._must_join_by
            and self._watched.cause is None
        ):
            self._watched.cancel_on_all(NOT_JOINED)
        if self._watched.cause is not None and self._cancelled_at == math.inf:
            self._watched.clear_event()
            self._cancel_objective()
        if clock.now() > self._kill_at:
            self._kill_trainer()
        elif clock.now() >= self._interrupt_at:
            self._interrupt_at = clock.now() + _POLL_SECONDS
            self._trainer.interrupt()

    def _handle_message(self, message: Message) -> None:
        if message.kind == "interrupted":
            self._frames = [FrameSummary(*frame) for frame in message["frames"]]
            self._kill_at = self._cancelled_at + _SECONDS_TO_CLEAN_UP
            self._interrupt_at = math.inf
        elif message.kind == "seen":
            self.trace = dict(message.content)
        elif message.kind == "joined":
            self._has_joined = True
            # The time to start and connect trainers does not count.
            self._attempt.began_at = clock.now()
            self._record_memory(
                message.content.get("free_memory", 0), message.content.get("warning", "")
            )

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

        If the trainer does not react soon, for example in native code, it is killed. The signal is
        repeated, since the trainer may not have begun the evaluation. A trainer that has not joined
        the process group runs no objective, so it is killed at once.
        """
        self._cancelled_at = self._interrupt_at = self._kill_at = clock.now()
        if self._has_joined:
            # On busy cores, a program needs more than a second to end and to send its trace.
            is_patient = self._is_traced or self._watched.cause == RUN_STOPS
            self._kill_at += _SECONDS_TO_CLEAN_UP if is_patient else _SECONDS_TO_ACKNOWLEDGE

    def _kill_trainer(self) -> None:
        """Kill a trainer that has not ended after its cancellation. Record where it is, unless it sent that."""
        if not self._frames and not self._trainer.is_killed:
            self._frames = self._trainer.find_stack()
        self._trainer.kill()

    def _end_hanging_objective(self, frames: Sequence[FrameSummary]) -> ObjectiveEnd:
        """Interrupt an objective that hangs in a collective (see `HangDetector`), and describe its end."""
        # The signal takes effect when its peers have ended, which ends its wait.
        self._cancelled_at = clock.now()
        self._trainer.interrupt()
        return ObjectiveEnd(
            failure=_describe_timeout(self._group.patience),
            gave_up=True,
            seconds=self._group.patience,
            at=time.time(),
            place=self._user_frames.find_position(frames),
            traceback=format_stack(frames),
        )

    def _make_end(self, end: ObjectiveEnd) -> RankEnd:
        """Add to the end that the trainer has described what this rank knows."""
        self._has_ended = end.ends_trainer
        if end.failure is None:
            return RankEnd(self._group.rank, **vars(end))
        failure = end.failure
        cause = self._watched.cause
        if end.is_status:
            failure += self._trainer.describe_last_error()
        timeout = end.gave_up and end.seconds >= self._group.patience
        is_cancelled = end.is_cancelled and cause is not None
        if is_cancelled:
            failure = cause or ""
        elif timeout:
            failure = _describe_timeout(self._group.patience)
        return RankEnd(
            self._group.rank,
            **{**vars(end), "failure": failure},
            own=not is_cancelled,
            timeout=timeout,
            suspended=end.gave_up and clock.measure_lost() > self._lost_seconds,
            stopped=cause == RUN_STOPS,
            has_begun=self._has_joined,
        )

    def _describe_crash(self, ended: TrainerEnd) -> RankEnd:
        """Return the end of a trainer that has ended by itself, or did not react to a cancellation."""
        self._crash = ended.text
        cause = self._watched.cause
        is_own = not self._trainer.is_killed
        frames = () if is_own else self._frames
        frames = frames or ended.frames
        failure = ended.text if is_own or cause is None else cause
        timeout = is_own and self._trainer.has_watchdog_aborted(ended)
        return RankEnd(
            self._group.rank,
            failure=_describe_timeout(self._group.patience) if timeout else failure,
            own=is_own,
            echo=not is_own and are_in_collective(frames),
            timeout=timeout,
            suspended=timeout and clock.measure_lost() > self._lost_seconds,
            stopped=cause == RUN_STOPS,
            orphaned=self._trainer.has_lost_template,
            has_begun=self._has_joined,
            at=time.time(),
            place=self._user_frames.find_position(frames),
            traceback=format_stack(frames),
        )

    def _end_failed_objective(self) -> None:
        """End a failed objective, and kill its trainer, so that peers that wait for it fail at once."""
        if not self._has_ended:
            self._kill_at = min(self._cancelled_at, clock.now()) + _SECONDS_TO_CLEAN_UP
            self._wait_for_end()
        self._group.slot.discard_trainer()

    def _wait_for_end(self) -> None:
        while not self._has_ended:
            if clock.now() > self._kill_at:
                self._trainer.kill()
            found = self._trainer.wait(min(max(self._kill_at - clock.now(), 0.01), _POLL_SECONDS))
            if isinstance(found, TrainerEnd):
                self._has_ended = True
            elif found is not None and found.kind == "idle":
                self._record_idle(found)
            elif found is not None:
                self._handle_message(found)

    def _record_idle(self, message: Message) -> None:
        self._has_ended = True
        self.is_clean = bool(message["is_clean"])
        self.remains = message.get("remains", "")


def _describe_timeout(patience: float) -> str:
    """Return the failure of a rank that has waited for its peers for `patience` seconds."""
    return f"waited {patience:g} s (--collective-timeout)"


class FunctionSupervision(Supervision):
    """Supervises one evaluation of an objective function on one rank.

    The trainers of all ranks agree on each report. Only the trainer of the leader sends it, and
    waits for the answer.
    """

    # A verdict that requires copies, and the time at which they began.
    _awaited: tuple[Verdict, float] | None = None

    def start_objective(self, ticket: GroupTicket | None, seed: int, folder: Path) -> None:
        """Let the trainer start the objective, after it has joined the process group of `ticket`, if that is given."""
        attempt = self._attempt
        start = attempt.start
        path = str(start.path) if start.path else None
        request = EvaluationRequest(
            attempt.assignment.params,
            seed,
            attempt.assignment.root,
            str(folder),
            ticket,
            free_memory=self._group.slot.first_free_memory,
            checkpoint=path if start.is_own else None,
            parent_checkpoint=None if start.is_own else path,
            is_traced=self._is_traced,
            is_compared=self._group.compares_collectives,
        )
        self._trainer.send("evaluate", **request.encode())

    @property
    def _overdue_at(self) -> float:
        # An objective gets time to reach its next loss, and ends there.
        return super()._overdue_at + self._group.patience

    def _handle_message(self, message: Message) -> None:
        if message.kind == "report" and self._leader is not None:
            self._watch_for_hang()
            self._answer_report(self._leader, Report(**message.content))
        elif message.kind == "reported":
            self._watch_for_hang()
        elif message.kind == "kept" and self._leader is not None and self._awaited is not None:
            self._keep_copies(self._leader, self._awaited, message)
        else:
            super()._handle_message(message)

    def _poll(self) -> None:
        super()._poll()
        # Twice the limit of a collective, so that a collective which waits for a peer fails first,
        # and names the peer.
        limit = 2 * self._group.patience
        if (
            self._awaited is not None
            and clock.now() > self._awaited[1] + limit
            and self._watched.cause is None
        ):
            self._watched.cancel_on_all(
                f"{TIMEOUT_PREFIX}an offered function has not returned after {limit:g} s"
            )

    @property
    def _seconds_for_peers(self) -> float:
        # The trainers have agreed on the end, and only have to gather what the objective has
        # offered.
        return self._group.patience + _SECONDS_TO_ACKNOWLEDGE

    def _keep_copies(
        self, leader: Leader, awaited: tuple[Verdict, float], message: Message
    ) -> None:
        """Keep the copies of weights and checkpoint that the trainer has made in memory."""
        drafts = dict(
            zip(message["kinds"], map(Draft.from_descriptor, message.descriptors), strict=True)
        )
        verdict, since = awaited
        self._awaited = None
        errors = message["errors"]
        leader.warn_about_copies(
            self._attempt, errors.get("weights", ""), errors.get("checkpoint", "")
        )
        leader.keep_drafts(
            self._attempt, verdict, drafts.get("checkpoint"), drafts.get("weights"), since
        )

    def _answer_report(self, leader: Leader, report: Report) -> None:
        """Decide on a report, and send the trainer the answer, with what it must copy."""
        verdict = self._decide(leader, report)
        if verdict.keep or verdict.save:
            self._awaited = (verdict, clock.now())
        answer = ReportAnswer(not verdict.ends_evaluation, verdict.keep, verdict.save)
        self._trainer.send("answer", **vars(answer))

    def _finish(self) -> None:
        super()._finish()
        is_complete = self._attempt.verdict.state == State.COMPLETE
        if self._awaited is not None and self._leader is not None and is_complete:
            reason = self._crash or "they were not copied in time"
            self._leader.warn_about_lost_weights(self._attempt, self._awaited[0], reason)


class HangDetector:
    """Checks at intervals whether an objective blocks in a collective of torch.distributed.

    The check is needed for process groups that the objective creates. Their collectives would wait
    for 30 minutes, the default of torch. The default process group has a shorter timeout.

    Only a process whose main thread sleeps and uses no CPU time is asked for its stack. A process
    that is running Python code may crash, since faulthandler reads frames that are being made or
    removed (seen with Python 3.13).

    Args:
        trainer: The process that runs the objective.
        patience: Seconds after which a blocked objective counts as hanging.
    """

    def __init__(self, trainer: TrainerClient, patience: float) -> None:
        self._trainer = trainer
        self._patience = patience
        self._interval = patience / _CHECKS_PER_WAIT
        self._since = clock.now()
        self.next_check = self._since + self._interval
        _, self._ticks = trainer.read_thread_state()
        self.frames: Sequence[FrameSummary] = ()

    def is_hanging(self, now: float) -> bool:
        """Return whether an objective has blocked at one line in torch.distributed for `patience` seconds."""
        if now < self.next_check:
            return False
        self.next_check = now + self._interval
        is_asleep, ticks = self._trainer.read_thread_state()
        used = ticks - self._ticks
        self._ticks = ticks
        if not is_asleep and used <= _MAX_IDLE_TICKS:
            return False  # It waits for a core. The next check decides.
        frames = self._trainer.find_stack() if used <= _MAX_IDLE_TICKS else ()
        if not are_in_collective(frames):
            self.frames = ()
            return False
        if _find_positions(frames) != _find_positions(self.frames):
            self.frames = frames
            self._since = now
        return now - self._since >= self._patience


def _find_positions(frames: Sequence[FrameSummary]) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in frames]
