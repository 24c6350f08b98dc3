"""One individual, one loss: the objective run on all ranks of a worker, which agree after each step how it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.group import Group
from hpo.evaluation.leader import Leader
from hpo.evaluation.lockstep import Lockstep
from hpo.evaluation.meeting import Meeting
from hpo.evaluation.objective import NOT_FINITE, Objective
from hpo.evaluation.surroundings import as_before
from hpo.evaluation.verdict import Verdict
from hpo.evaluation.worker import Calls
from hpo.problem import Problem
from hpo.process import clock
from hpo.process.printed import Printed
from hpo.ranks.sharing import Shared
from hpo.ranks.watch import Watch
from hpo.ranks.watched import Details
from hpo.store.states import State, read_state
from hpo.store.trials import Assignment
from hpo.text import named

_MOST_SUSPENSIONS = 20  # of the job in one evaluation, each of which made a rank wait in vain


def _has_diverged(attempt: Attempt) -> bool:
    """Tell whether an evaluation has failed by its loss, and not by what it was given; the same on all ranks."""
    return NOT_FINITE in attempt.verdict.failure


@dataclass(frozen=True)
class Task:
    """What objectives are called with, beside their hyperparameters; `seed` is for individuals without one."""

    problem: Problem
    data: Shared
    seed: int


class Evaluator:
    """Evaluates individuals on one worker; called by all of the worker's ranks at the same time.

    `leader` is None on all ranks but the worker's leader.
    """

    def __init__(self, task: Task, group: Group, watch: Watch, printed: Printed, leader: Leader | None = None) -> None:
        self._task = task
        self._group = group
        self._watch = watch
        self._printed = printed
        self._leader = leader

    def __call__(self, assignment: Assignment | None) -> tuple[dict[str, Any], float] | None:
        """Evaluate the individual that the leader has claimed, and return its hyperparameters and its loss.

        The loss is the lowest that the objective has yielded or returned, and infinite if the evaluation has failed on
        any rank. Returns None where the leader has claimed nothing, or the run stops.
        """
        told: Assignment | None = self._group.own_comm.bcast(assignment)
        if told is None:
            return None
        started = clock.now()
        attempt = self._judged(told)
        if self._leader:
            self._leader.finish(attempt, attempt.seconds_before + clock.now() - started)
        return None if attempt.verdict.state == "stopped" else (told.params, attempt.loss)

    def _judged(self, assignment: Assignment) -> Attempt:
        """Evaluate an individual, and again where a suspended job or torch's check made the evaluation fail.

        So is one that cannot go on from its state: it begins again.
        """
        checked = True
        for _ in range(_MOST_SUSPENSIONS):
            attempt = self._evaluate(assignment)
            if self._leader and attempt.verdict.state == "suspended":
                self._leader.write_state(attempt)
            if attempt.verdict.state == "again" and checked:
                checked = False
                self._group.trust()
            elif attempt.verdict.state == "failed" and attempt.has_been_given and not _has_diverged(attempt):
                if self._leader:
                    self._leader.reject(assignment, attempt.verdict.failure, is_own=attempt.restored is not None)
                if attempt.restored is None:
                    assignment = replace(assignment, parent=None)
            elif attempt.verdict.state != "suspended":
                return attempt
        reason = f"timeout: the job was suspended in each of {_MOST_SUSPENSIONS} attempts"
        attempt.verdict = Verdict("failed", failure=reason)
        return attempt

    def _evaluate(self, assignment: Assignment) -> Attempt:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        self._group.connect(self._watch.post.alone)
        attempt, task = Attempt(assignment, *self._known(assignment)), self._task
        seed = task.seed if assignment.seed is None else assignment.seed
        objective = Objective(task.problem, assignment.params)
        with self._watch.evaluation(self._details(attempt)) as watched:
            decide = partial(self._leader.decide, attempt, watched) if self._leader else None
            meeting = Meeting(self._group, self._watch, watched, self._printed, decide)
            lockstep = Lockstep(objective, self._group, watched, meeting, attempt, self._leader)
            calls = Calls(
                task.data.load, attempt.offer, lockstep.report, attempt.save, lockstep.restored, attempt.inherit
            )
            worker = self._group.worker(seed, calls)
            with as_before(), self._printed.marked():
                while attempt.goes_on:
                    lockstep.step(worker)
                self._end(attempt, lockstep)
        return attempt

    def _known(self, assignment: Assignment) -> tuple[State | None, State | None]:
        """Return the state that this evaluation may go on from, or else the one that it inherits.

        Both are None where not all ranks can read it.
        """
        path, is_own = self._group.own_comm.bcast(self._leader.find(assignment) if self._leader else (None, True))
        if path is None:
            return None, None
        state, reason = None, ""
        try:
            state = read_state(path, assignment.params if is_own else None, is_checked=False)
        except ValueError as error:
            reason = f"rank {self._group.rank}: {error}"
        reasons = [reason for reason in self._group.own_comm.allgather(reason) if reason]
        if reasons:
            if self._leader:
                self._leader.reject(assignment, reasons[0], is_own)
            return None, None
        return (state, None) if is_own else (None, state)

    def _details(self, attempt: Attempt) -> Details:
        assignment, leader = attempt.assignment, self._leader
        about = f"trial {assignment.number} ({named(assignment.params)})"
        if leader is None:
            return Details(self._group.cut, math.inf, about)
        overdue_after = leader.limits.evaluation_timeout + self._group.patience
        return Details(self._group.cut, overdue_after, about, partial(self._give_up, leader, attempt))

    def _give_up(self, leader: Leader, attempt: Attempt, failure: str, stack: str) -> None:
        self._group.descriptors.take_back()
        leader.give_up(attempt, failure, stack)

    def _end(self, attempt: Attempt, lockstep: Lockstep) -> None:
        """Clean up after an evaluation; its objective is closed if it has not ended by itself."""
        verdict = attempt.verdict
        if attempt.was_broken_off:
            attempt.loss = math.inf
            lockstep.abandon()
        elif verdict.loss is not None:
            lockstep.close(patient=True)
            self._group.renew_comm()
        elif verdict.leaves_messages:
            self._group.renew_comm()
        self._group.tidy()
