"""An objective on all ranks of a worker: taken from loss to loss together, called off together, closed together."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

from hpo.errors import RunError
from hpo.evaluation.collectives import collective_of
from hpo.evaluation.group import Group
from hpo.evaluation.objective import Objective
from hpo.evaluation.verdict import Step, Verdict, judge
from hpo.process import clock
from hpo.process.failure import stack_of, traceback_of, with_hint
from hpo.process.leaving import end_if_forked
from hpo.process.place import frames_of
from hpo.process.printed import Printed
from hpo.ranks.communicator import GAVE_UP, sleep_until
from hpo.ranks.watch import STOPPED, Watch
from hpo.ranks.watched import CalledOff, Watched

# What gloo says where a peer has ended the connection, or has died.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# What it says where a rank has waited in vain, in a collective or in the check before it.
_TIMEOUTS = ("Timed out waiting", "Application timeout caused pair closure", "failed to pass monitoredBarrier", GAVE_UP)

_SECONDS_TO_SAY_WHY = 5.0  # for a rank that is stuck, before its peers say so


# Called on the leader with the verdict of all ranks on a step, and what they have printed in it; returns the final one.
Decide = Callable[[Verdict, str], Verdict]


class Lockstep:
    """Takes an objective on one rank from loss to loss, as all ranks of the worker do at the same time."""

    def __init__(self, objective: Objective, group: Group, watch: Watch, watched: Watched, printed: Printed) -> None:
        self._objective = objective
        self._group = group
        self._watch = watch
        self._watched = watched
        self._printed = printed

    def step(self, decide: Decide | None) -> Verdict:
        """Go on to the next loss on all ranks, and return the verdict, the same on all ranks.

        `decide` returns the final verdict; it is None on all ranks but the leader.
        """
        steps = self._meet(self._advance())
        verdict = None
        if decide is not None:
            judged = replace(judge(steps), leaves_messages=any(step.unreceived for step in steps))
            verdict = decide(judged, "".join(step.printed for step in steps))
        told: Verdict = self._group.own_comm.bcast(verdict)
        return told

    def close(self, patient: bool = False) -> None:
        """Close an objective that has not ended by itself."""
        try:
            with self._watched.closing(patient):
                self._objective.close()
        except BaseException:
            logging.getLogger(__name__).info("while an objective was closed:\n%s", traceback.format_exc())
        self._printed.take()

    def abandon(self) -> None:
        """Close an objective, and the process group, in which ranks may still wait."""
        self._group.cut()
        self.close()
        self._group.renew_comm()  # the ranks wait for each other in it: all are cut when the first one disconnects
        self._group.disconnect()

    def _advance(self) -> Step:
        """Run the objective on this rank up to its next loss; whatever it raises is caught, and becomes a failure."""
        rank, began, lost = self._group.rank, clock.now(), clock.lost()
        try:
            with self._group.descriptors.lent(), self._watched.interruptible():
                yielded = self._objective.advance()
        except BaseException as error:
            end_if_forked(error)
            return self._failed(error, clock.now() - began, clock.lost() > lost)
        end_if_forked()
        loss, metrics = yielded if yielded is not None else (None, {})
        return Step(rank, loss, metrics, place=self._objective.place())

    def _meet(self, step: Step) -> list[Step]:
        """Wait for the worker's other ranks, call off late ones, and return the steps of all ranks on the leader."""
        patience, here = self._group.patience, self._group.own_comm.arrive()
        if step.failure is None and not sleep_until(here, patience):
            self._watched.call_off(f"a peer {self._waited}")
            stack = stack_of(self._objective.frames())
            step = replace(step, failure=self._waited, timeout=True, at=time.time(), traceback=stack)
        if not sleep_until(here, patience + _SECONDS_TO_SAY_WHY):
            raise RunError(
                f"{self._watch.post.name} waits in vain for {self._watch.names_of_peers}: their evaluation was "
                f"called off {patience:g} s ago (--collective-timeout), and one of them is gone"
            )
        step = replace(step, printed=self._printed.take(), unreceived=self._group.comm.has_unreceived)
        return self._group.own_comm.gather(step) or []

    def _failed(self, error: BaseException, waited: float, suspended: bool) -> Step:
        """Return what the objective raised as a failure, and tell the peers, which may be waiting for this rank."""
        cause, reason = self._watched.cause, f"{type(error).__name__}: {with_hint(error)}"
        if cause is None:
            self._watched.call_off(f"a peer failed: {reason}")
        self._group.cut()
        frames = frames_of(error) or self._objective.frames() or self._objective.definition()
        gave_up = isinstance(error, (RuntimeError, TimeoutError)) and any(text in reason for text in _TIMEOUTS)
        timeout = gave_up and waited >= self._group.patience
        step = Step(
            self._group.rank,
            failure=cause or (self._waited if timeout else reason),
            own=cause is None,
            echo=any(text in reason for text in _ECHOES),
            timeout=timeout,
            suspended=gave_up and suspended,
            collective=collective_of(reason),
            stopped=cause == STOPPED,
            at=time.time(),
            place=self._objective.place(frames),
            traceback=stack_of(frames) if isinstance(error, CalledOff) else traceback_of(error, frames),
        )
        traceback.clear_frames(error.__traceback__)  # they hold the model
        error.__traceback__ = None
        return step

    @property
    def _waited(self) -> str:
        return f"waited {self._group.patience:g} s (--collective-timeout)"
