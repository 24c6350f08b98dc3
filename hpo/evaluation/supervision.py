"""An objective on one rank of a worker, supervised: its trainer is waited for, cancelled, and judged."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.group import Group
from hpo.evaluation.leader import Leader
from hpo.evaluation.meeting import Meeting, waited_in_vain
from hpo.evaluation.trainer import Ended, Trainer
from hpo.evaluation.verdict import Step, Verdict
from hpo.evaluation.waiting import Waiting
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.failure import stack_of
from hpo.process.place import Places
from hpo.ranks.watch import STOPPED
from hpo.ranks.watched import Watched

_SECONDS_TO_ACKNOWLEDGE = 1.0  # a cancellation, which native code does not
_SECONDS_TO_CLEAN_UP = 5.0  # `finally` blocks of an objective that was cancelled
SECONDS_BETWEEN_LOOKS = 0.5
_FIELDS = tuple(Step.__dataclass_fields__)


class Supervision:
    """One evaluation on one rank. `overdue_after` is in seconds, for the leader, or infinite.

    The ranks are of several workers if they are a team: an evaluation that fails there continues on its own worker.
    """

    _interval = SECONDS_BETWEEN_LOOKS

    def __init__(  # noqa: PLR0913 - all of it is bound once, before an evaluation starts
        self,
        group: Group,
        watched: Watched,
        meeting: Meeting,
        attempt: Attempt,
        leader: Leader | None,
        places: Places,
        overdue_after: float,
        is_team: bool = False,
    ) -> None:
        self._group = group
        self._watched = watched
        self._meeting = meeting
        self._attempt = attempt
        self._leader = leader
        self._places = places
        self._overdue_after = overdue_after
        self._is_team = is_team
        self._trainer: Trainer = group.trainer
        self._frames: Sequence[FrameSummary] = ()  # of a trainer that was cancelled
        self._cancelled_at = self._interrupt_at = math.inf
        self._kill_at = math.inf
        self.is_clean = False
        self._has_joined = self._has_ended = False
        self._lost = clock.lost()
        self.seen: dict[str, Any] = {}

    def begin(self, ticket: dict[str, Any] | None, seed: int, folder: Path, is_watched: bool) -> None:
        """Let the trainer begin; the objective may make the evaluation's folder."""
        attempt, path = self._attempt, str(self._attempt.path) if self._attempt.path else None
        self._has_joined = ticket is None
        self._trainer.send(
            "evaluate",
            params=attempt.assignment.params,
            seed=seed,
            trial=attempt.assignment.root,
            folder=str(folder),
            ticket=ticket,
            restored=path if attempt.restored is not None else None,
            inherited=path if attempt.inherited is not None else None,
            is_watched=is_watched,
            is_compared=self._group.is_compared,
        )

    def step(self) -> None:
        """Wait for the objective's next loss, or its end, and settle with the other ranks what follows."""
        step = self._next_step("step")
        self._attempt.take_step(step)
        verdict, since = self._meeting.verdict(step), clock.now()
        gathers = (verdict.keep and step.gathers) or (verdict.save and step.saves)
        if gathers:
            self._tell(verdict, gathers=True)
            gathered = self._meeting.verdict(self._next_step("gathered"))
            if gathered.state != "complete":
                verdict = replace(gathered, loss=verdict.loss)
        is_best = verdict.loss is not None and verdict.loss < self._attempt.loss
        self._attempt.take(verdict)
        self._tell(verdict, gathers=False, is_best=is_best)
        if self._leader is not None and (verdict.keep or verdict.save):
            self._keep(verdict, since)
        if self._attempt.goes_on and verdict.is_last:  # that nothing comes behind it, nobody has to be asked
            self._attempt.take(Verdict("complete", inherited=verdict.inherited))

    def end(self) -> None:
        """Wait until the objective has ended; kill the trainer if the evaluation was broken off.

        The last state of an evaluation that is to continue elsewhere is written first.
        """
        broken = self._attempt.was_broken_off
        if not self._has_ended:
            self._kill_at = clock.now() + (_SECONDS_TO_CLEAN_UP if broken else self._group.patience)
            self._wait_for_end()
        if broken:
            if self._leader is not None and self._attempt.verdict.state in ("stopped", "suspended"):
                self._leader.write_state(self._attempt)
            self._group.slot.discard()

    # Waiting for the trainer

    def _next_step(self, kind: str) -> Step:
        """Return what the trainer says of its objective's next step, or what became of it."""
        found = self._receive(kind)
        step = self._step_of_end(found) if isinstance(found, Ended) else self._step_of(found.content)
        self._trainer.read_output()
        if step.failure is not None:
            if self._watched.cause is None:
                self._watched.call_off(f"a peer failed: {step.failure}")
            self._leave_failed(step)
        return step

    def _receive(self, kind: str) -> Message | Ended:
        """Wait for a message of the trainer, or its end; cancel the evaluation if it is called off or overdue."""
        waiting = Waiting(self._group.patience + _SECONDS_TO_ACKNOWLEDGE)
        while True:
            self._limit()
            self._look()
            now = clock.now()
            if self._watched.cause is None and waiting.is_in_vain(self._trainer, now):
                return self._give_up(waiting.frames)
            until = min(self._kill_at, self._overdue_at, waiting.next_look) - now
            seconds = min(max(until, 0.01), self._interval)
            found = self._trainer.wait(seconds, self._watched, *self._group.listeners)
            self._group.serve_visitors()
            if isinstance(found, Ended):
                self._has_ended = True
                return found
            if found is not None and found.kind == kind:
                return found
            if found is not None:
                self._take_note(found)

    def _look(self) -> None:
        """Do what is to be done now and then while the trainer is waited for."""

    @property
    def _overdue_at(self) -> float:
        return self._attempt.began + self._overdue_after

    def _limit(self) -> None:
        """Cancel the objective if the evaluation is called off or overdue, and kill a trainer that has had its time."""
        if clock.now() > self._overdue_at and self._watched.cause is None:
            self._watched.call_off("timeout: no loss came at which to stop it (--evaluation-timeout)")
        if self._watched.cause is not None and self._cancelled_at == math.inf:
            self._watched.clear()
            self._cancel()
        if clock.now() > self._kill_at:
            self._trainer.kill()
        elif clock.now() >= self._interrupt_at:
            self._interrupt_at = clock.now() + SECONDS_BETWEEN_LOOKS
            self._trainer.interrupt()

    def _take_note(self, message: Message) -> None:
        if message.kind == "interrupted":
            self._kill_at, self._interrupt_at = self._cancelled_at + _SECONDS_TO_CLEAN_UP, math.inf
        elif message.kind == "seen":
            self.seen = dict(message.content)
        elif message.kind == "joined":
            self._has_joined = True
            self._attempt.began = clock.now()  # to fork trainers and to connect them is not the evaluation's time

    def _cancel(self) -> None:
        """Ask where the objective is, and let it be ended by an exception; native code is given little time.

        The signal is repeated: a trainer may not have begun the evaluation. Before it has joined the process group, no
        objective runs in it.
        """
        self._frames = self._trainer.find_stack()
        self._cancelled_at = self._interrupt_at = self._kill_at = clock.now()
        if self._has_joined:
            stops = self._watched.cause == STOPPED
            self._kill_at += _SECONDS_TO_CLEAN_UP if stops else _SECONDS_TO_ACKNOWLEDGE

    def _give_up(self, frames: Sequence[FrameSummary]) -> Message:
        """Return the step of a rank that has waited in a process group of the objective's own for as long as it may."""
        self._cancelled_at = clock.now()  # it is cancelled once its peers are gone, which ends its wait
        self._trainer.interrupt()
        content = {
            "failure": waited_in_vain(self._group.patience),
            "gave_up": True,
            "seconds": self._group.patience,
            "at": time.time(),
            "place": self._places.of(frames),
            "traceback": stack_of(frames),
        }
        return Message("step", content)

    def _step_of(self, content: Any) -> Step:
        if "is_clean" in content:  # the objective has returned with this step
            self._has_ended, self.is_clean = True, bool(content["is_clean"])
        known = {name: value for name, value in content.items() if name in _FIELDS}
        if content.get("is_status"):
            known["failure"] += self._trainer.last_error()
        step = Step(**{**known, "rank": self._group.rank})
        if step.failure is None:
            return step
        gave_up, cause = bool(content.get("gave_up")), self._watched.cause
        timeout = gave_up and content["seconds"] >= self._group.patience
        is_cancelled = bool(content.get("is_cancelled")) and cause is not None
        if is_cancelled:
            step = replace(step, failure=cause)
        elif timeout:
            step = replace(step, failure=waited_in_vain(self._group.patience))
        return replace(
            step,
            own=not is_cancelled,
            timeout=timeout,
            suspended=gave_up and clock.lost() > self._lost,
            stopped=cause == STOPPED,
        )

    def _step_of_end(self, ended: Ended) -> Step:
        """Return the failure of a trainer that has ended: by itself, or since it was cancelled and did not answer."""
        cause, is_own = self._watched.cause, not self._trainer.is_killed
        frames = () if is_own else self._frames
        frames = frames or ended.frames
        return Step(
            self._group.rank,
            failure=ended.text if is_own or cause is None else cause,
            own=is_own,
            stopped=cause == STOPPED,
            orphaned=self._trainer.has_lost_template,
            at=time.time(),
            place=self._places.of(frames),
            traceback=stack_of(frames),
        )

    def _leave_failed(self, step: Step) -> None:
        """Let an objective that has failed end, and kill its trainer: peers that wait for it notice that at once."""
        if not self._has_ended:
            self._kill_at = min(self._cancelled_at, clock.now()) + _SECONDS_TO_CLEAN_UP
            self._wait_for_end()
        if self._leader is not None and (step.stopped or self._is_team or clock.lost() > self._lost):
            self._leader.write_state(self._attempt)  # it may continue from there
        self._group.slot.discard()

    def _wait_for_end(self) -> None:
        """Wait until the objective has ended, and kill a trainer that takes too long."""
        while not self._has_ended:
            if clock.now() > self._kill_at:
                self._trainer.kill()
            found = self._trainer.wait(min(max(self._kill_at - clock.now(), 0.01), SECONDS_BETWEEN_LOOKS))
            if isinstance(found, Ended):
                self._has_ended = True
            elif found is not None and found.kind == "ended":
                self._has_ended, self.is_clean = True, bool(found["is_clean"])
            elif found is not None:
                self._take_note(found)

    # Messages to the trainer

    def _tell(self, verdict: Verdict, gathers: bool, is_best: bool = False) -> None:
        """Send a verdict, unless the objective has ended, and nothing of its last loss is kept."""
        if self._has_ended and (self._leader is None or not (verdict.keep or verdict.save)):
            return
        attempt, leader = self._attempt, self._leader
        saves = (
            leader is not None and verdict.save and not gathers and verdict.state in ("going", "paused", "regrouped")
        )
        self._trainer.send(
            "verdict",
            goes_on=verdict.state == "going" and not verdict.is_last,
            has_loss=verdict.loss is not None,
            is_best=is_best,
            gathers=gathers,
            keep=verdict.keep,
            save=verdict.save if gathers else saves,
            about=leader.about(attempt) if saves and leader else None,
            draft=leader.draft(attempt) if saves and leader else "",
        )

    def _keep(self, verdict: Verdict, since: float) -> None:
        """Learn what the leader's trainer has kept of a loss."""
        found = self._receive("kept")
        if self._leader is None:
            return
        if isinstance(found, Message):
            self._leader.take_kept(self._attempt, verdict, found.content, since)
        else:
            self._leader.lose_kept(self._attempt, verdict, found.text)
