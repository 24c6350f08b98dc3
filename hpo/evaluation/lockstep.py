"""An objective on all ranks of a worker: taken from loss to loss together, called off together, closed together."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.collectives import collective_of
from hpo.evaluation.group import Group
from hpo.evaluation.leader import Leader
from hpo.evaluation.meeting import Meeting, waited_in_vain
from hpo.evaluation.objective import Objective, reported
from hpo.evaluation.state import Parts, copied, parts_of
from hpo.evaluation.verdict import Step, Verdict
from hpo.evaluation.worker import Worker, checked_weights
from hpo.process import clock
from hpo.process.failure import stack_of, traceback_of, with_hint
from hpo.process.leaving import end_if_forked, is_forked
from hpo.process.place import frames_here, frames_of
from hpo.ranks.communicator import GAVE_UP
from hpo.ranks.watch import STOPPED
from hpo.ranks.watched import CalledOff, Watched

# What gloo says where a peer has ended the connection, or has died.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# What it says where a rank has waited in vain, in a collective or in the check before it.
_TIMEOUTS = ("Timed out waiting", "Application timeout caused pair closure", "failed to pass monitoredBarrier", GAVE_UP)

T = TypeVar("T")
Frames = Sequence[traceback.FrameSummary]


class Lockstep:
    """Takes an objective on one rank from loss to loss, as all ranks of the worker do at the same time."""

    def __init__(
        self,
        objective: Objective,
        group: Group,
        watched: Watched,
        meeting: Meeting,
        attempt: Attempt,
        leader: Leader | None,
    ) -> None:
        self._objective = objective
        self._group = group
        self._watched = watched
        self._meeting = meeting
        self._attempt = attempt
        self._leader = leader
        self._settling = False
        self._bug: BaseException | None = None
        self._began, self._lost = clock.now(), clock.lost()

    def step(self, worker: Worker) -> None:
        """Let the objective go on to its next yield or its end on all ranks, and settle what comes of it."""
        said = self._run(lambda: self._objective.advance(worker))
        if self._bug is not None:
            raise self._bug
        if self._attempt.goes_on:
            frames = self._objective.frames()
            self._settle(said if isinstance(said, Step) else self._step(said, frames), frames)
            verdict = self._attempt.verdict
            if self._attempt.goes_on and verdict.is_last:  # that nothing comes behind it, nobody has to be asked
                inherited, leaves_messages = verdict.inherited, verdict.leaves_messages
                self._attempt.take(Verdict("complete", leaves_messages=leaves_messages, inherited=inherited))

    def report(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Settle a loss that the objective reports.

        Raises CalledOff where the evaluation is over, and RuntimeError where it is not the objective that calls this.
        """
        if is_forked():
            raise RuntimeError("worker.report is called by the worker's ranks, not by processes that they have forked")
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RuntimeError(f"worker.report is called in the main thread, in which the objective is, not in {name}")
        if self._settling:
            raise RuntimeError("worker.report is called in a function that was given to worker.offer")
        if not self._watched.is_inside:
            raise RuntimeError("worker.report is called after the evaluation of this worker has ended")
        with self._watched.outside(), self._group.descriptors.taken_back():
            if self._attempt.goes_on and self._bug is None:
                self._settle_reported(loss, metrics, frames_here())
        self._watched.interrupt()
        self._begin()

    def restored(self) -> Any:
        """Return what the evaluation has saved before it was interrupted, and let it go on with the losses it had."""
        state = self._attempt.go_on()
        self._objective.has_loss |= self._attempt.taken_over > 0
        return state

    def close(self, patient: bool = False) -> None:
        """Close an objective that has not ended by itself."""
        try:
            with self._watched.closing(patient):
                self._objective.close()
        except BaseException as error:
            _log(error)

    def abandon(self) -> None:
        """Close an objective, and the process group, in which ranks may still wait."""
        self._group.cut()
        self.close()
        self._group.renew_comm()  # the ranks wait for each other in it: all are cut when the first one disconnects
        self._group.disconnect()

    def _settle_reported(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> None:
        """Settle a loss, and begin to close the objective where the evaluation is over.

        Nothing is raised here, where an objective could catch it: a bug of this program is raised by `step`.
        """
        try:
            self._settle(self._step_reported(loss, metrics, frames), frames)
        except BaseException as error:
            self._bug = error
        if self._bug is not None or self._attempt.was_broken_off:
            self._group.cut()
            self._watched.begin_closing(patient=False)
        elif not self._attempt.goes_on:
            self._watched.begin_closing(patient=True)

    def _step_reported(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> Step:
        try:
            if self._watched.cause is not None:  # the objective has caught CalledOff
                raise CalledOff
            said = reported(loss, metrics)
        except (CalledOff, TypeError, ValueError) as error:
            return self._failed(error, frames)
        self._objective.has_loss = True
        return self._step(said, frames)

    def _settle(self, step: Step, frames: Frames) -> None:
        """Take over the verdict of all ranks on a step, and keep the weights of its loss, if they are to be kept."""
        self._settling = True
        try:
            attempt, verdict = self._attempt, self._meeting.verdict(step, frames)
            gathered, since = None, clock.now()
            if (verdict.keep and callable(attempt.offered)) or (verdict.save and step.saves):
                verdict, gathered = self._gathered(verdict, step, frames)
            attempt.take(verdict)
            if verdict.loss is not None:
                self._group.trust()
            if self._leader and verdict.keep:
                self._leader.copy_weights(attempt)
            if self._leader and verdict.save:
                self._leader.save(attempt, gathered, since)
            attempt.let_go()
        finally:
            self._settling = False

    def _gathered(self, verdict: Verdict, step: Step, frames: Frames) -> tuple[Verdict, Parts | None]:
        """Call the functions that all ranks have offered, or saved; the verdict is another one if one fails."""
        attempt = self._attempt
        states: list[Parts] = []

        def gather() -> None:
            if verdict.keep and callable(attempt.offered):
                weights = self._objective.gathered(attempt.offered)
                attempt.offered = checked_weights(weights) if self._leader else None
            if verdict.save and step.saves:
                saving = attempt.saving
                assert saving is not None
                parts = saving if isinstance(saving, Parts) else parts_of(self._objective.gathered(saving))
                states.append(copied(parts, is_kept=self._leader is not None))

        failed = self._run(gather, frames)
        gathered = self._meeting.verdict(failed or self._step(None, frames), frames)
        if gathered.state != "complete":
            return replace(gathered, loss=verdict.loss), None
        return verdict, states[0] if states else None

    def _step(self, said: tuple[float, dict[str, float]] | None, frames: Frames) -> Step:
        loss, metrics = said if said is not None else (None, {})
        gathers, saves = callable(self._attempt.offered), self._attempt.saves_together
        place, inherited = self._objective.place(frames), self._attempt.has_inherited
        ended = self._objective.has_ended
        return Step(self._group.rank, loss, metrics, gathers, saves, place=place, inherited=inherited, ended=ended)

    def _begin(self) -> None:
        self._began, self._lost = clock.now(), clock.lost()

    def _run(self, act: Callable[[], T], frames: Frames = ()) -> T | Step:
        """Let the objective act on this rank; whatever it raises is caught, and becomes a failure.

        `frames` is where the objective is, if it is not `act` that takes it there.
        """
        self._begin()
        try:
            with self._group.descriptors.lent(), self._watched.interruptible():
                done = act()
        except BaseException as error:
            end_if_forked(error)
            if self._attempt.goes_on and self._bug is None:
                return self._failed(error, frames)
            _log(error)  # it was raised because the evaluation was over
            return Step(self._group.rank)
        end_if_forked()
        return done

    def _failed(self, error: BaseException, frames: Frames) -> Step:
        """Return what the objective raised as a failure, and tell the peers, which may be waiting for this rank."""
        cause, reason = self._watched.cause, f"{type(error).__name__}: {with_hint(error)}"
        if cause is None:
            self._watched.call_off(f"a peer failed: {reason}")
        self._group.cut()
        frames = [*frames, *frames_of(error)] or self._objective.frames() or self._objective.definition()
        gave_up = isinstance(error, (RuntimeError, TimeoutError)) and any(text in reason for text in _TIMEOUTS)
        timeout = gave_up and clock.now() - self._began >= self._group.patience
        step = Step(
            self._group.rank,
            failure=cause or (waited_in_vain(self._group.patience) if timeout else reason),
            own=cause is None,
            echo=any(text in reason for text in _ECHOES),
            timeout=timeout,
            suspended=gave_up and clock.lost() > self._lost,
            collective=collective_of(reason),
            stopped=cause == STOPPED,
            at=time.time(),
            place=self._objective.place(frames),
            traceback=stack_of(frames) if isinstance(error, CalledOff) else traceback_of(error, frames),
            inherited=self._attempt.has_inherited,
        )
        _forget(error)
        return step


def _forget(error: BaseException) -> None:
    """Let go of what the frames of an exception hold, such as the model."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _log(error: BaseException) -> None:
    """Log what an objective raised while it was closed, unless it was only told to end."""
    if not isinstance(error, CalledOff):
        text = "".join(traceback.format_exception(error))
        logging.getLogger(__name__).info("while an objective was closed:\n%s", text)
    _forget(error)
