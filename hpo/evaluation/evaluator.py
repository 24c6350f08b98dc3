"""One individual, one loss: the objective run on all ranks of a worker, which agree after each step how it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.group import Group
from hpo.evaluation.growing import Claim, Growing, Invitation, Told
from hpo.evaluation.leader import Leader
from hpo.evaluation.lockstep import Lockstep
from hpo.evaluation.meeting import Decide, Meeting
from hpo.evaluation.objective import NOT_FINITE, Objective
from hpo.evaluation.state import broadcast
from hpo.evaluation.surroundings import as_before
from hpo.evaluation.teams import Teams
from hpo.evaluation.verdict import TIMEOUT, Verdict
from hpo.evaluation.worker import Calls
from hpo.problem import Problem
from hpo.process import clock
from hpo.ranks.job import Job
from hpo.ranks.sharing import Shared
from hpo.ranks.watched import Details, Watched
from hpo.store.states import State, read_state
from hpo.store.trials import Assignment
from hpo.text import named

_MOST_SUSPENSIONS = 20  # of the job in one evaluation, each of which made a rank wait in vain


Evaluated = tuple[dict[str, Any], float, Mapping[str, float]]  # hyperparameters, loss and metrics


def _has_diverged(attempt: Attempt) -> bool:
    """Tell whether an evaluation has failed by its loss, and not by what it was given; the same on all ranks."""
    return NOT_FINITE in attempt.verdict.failure


def _may_be_its_ranks(attempt: Attempt) -> bool:
    """Tell whether an evaluation may have failed because of the number of its ranks; the same on all ranks."""
    verdict = attempt.verdict
    return verdict.state == "failed" and not verdict.failure.startswith(TIMEOUT) and not _has_diverged(attempt)


@dataclass(frozen=True)
class Found:
    """Whether the leader has the state that an evaluation may begin with, or in which file it is, and if its own."""

    has_state: bool
    path: Path | None
    is_own: bool


def _found(leader: Leader, assignment: Assignment, state: State | None) -> Found:
    """Return what the leader knows of the state that an evaluation may begin with."""
    path, is_own = (None, True) if state else leader.find(assignment)
    return Found(state is not None, path, is_own)


@dataclass(frozen=True)
class Task:
    """What objectives are called with, beside their hyperparameters; `seed` is for individuals without one."""

    problem: Problem
    data: Shared
    seed: int


class Evaluator:
    """Evaluates individuals on one worker; called by all of the worker's ranks at the same time.

    `leader` is None on all ranks but the worker's leader. With `teams`, workers help each other, which `growing` says
    on leaders.
    """

    def __init__(
        self,
        task: Task,
        group: Group,
        job: Job,
        leader: Leader | None = None,
        teams: Teams | None = None,
        growing: Growing | None = None,
    ) -> None:
        self._task = task
        self._own = self._group = group
        self._watch = job.watch
        self._printed = job.printed
        self._worker_leader = leader
        self._teams = teams
        self._growing = growing

    @property
    def _leader(self) -> Leader | None:
        """The leader of the evaluation that this rank is at, if this rank is its leader's."""
        return self._worker_leader if self._group.rank == 0 else None

    def __call__(self, claim: Claim | None) -> Evaluated | None:
        """Evaluate the individual that the leader claims, and return its hyperparameters, its loss and its metrics.

        The loss is the lowest that the objective has yielded or returned, and infinite if the evaluation has failed on
        any rank; the metrics are those that came with it. Returns None where the leader has claimed nothing, or the run
        stops; this worker has helped others by then, if workers do so. `claim` is None on all ranks but the leader.
        """
        while isinstance(told := self._own.own_comm.bcast(self._next(claim)), Invitation):
            self._in_teams(told.assignment, told.workers)
        if told is None:
            return None
        started = clock.now()
        attempt = self._in_teams(told, (self._own.index,))
        if self._growing:
            self._growing.end()
        if self._leader:
            self._leader.finish(attempt, attempt.earlier + clock.now() - started)
        if attempt.verdict.state != "stopped":
            return told.params, attempt.loss, attempt.metrics
        return self(None if claim is None else lambda: None) if self._teams else None

    def _next(self, claim: Claim | None) -> Told:
        if claim is None:
            return None
        return self._growing.next(claim) if self._growing else claim()

    def _in_teams(self, assignment: Assignment, workers: tuple[int, ...]) -> Attempt:
        """Evaluate an individual with these workers, and go on with others as told, until it ends or this one parts."""
        state: State | None = None
        earlier: float | None = None
        while True:
            if self._growing and workers[0] == self._own.index:
                self._growing.begin(assignment, workers, state)
            with self._teams.of(workers) if self._teams else nullcontext(self._own) as self._group:
                attempt = self._judged(assignment, state, earlier)
            self._group = self._own
            workers, state, earlier = attempt.verdict.workers, attempt.state, attempt.earlier
            if self._own.index not in workers:
                return attempt

    def _judged(self, assignment: Assignment, state: State | None, earlier: float | None) -> Attempt:
        """Evaluate an individual, and again where a suspended job or torch's check made the evaluation fail.

        So is one that cannot go on from its state: it begins again. One that fails in a team is to go on with its own
        worker alone. The leader may have the `state` that it goes on from, and all ranks have the seconds of `earlier`
        sessions if it goes on.
        """
        checked = True
        for _ in range(_MOST_SUSPENSIONS):
            attempt = self._evaluate(assignment, state, earlier)
            earlier = attempt.earlier if attempt.has_loss else earlier
            if self._leader and attempt.verdict.state == "suspended":
                self._leader.write_state(attempt)
                state = None
            if attempt.verdict.state == "again" and checked:
                checked = False
                self._group.trust()
            elif self._group is not self._own and _may_be_its_ranks(attempt):
                return self._alone(attempt)
            elif attempt.verdict.state == "failed" and attempt.has_been_given and not _has_diverged(attempt):
                if self._leader:
                    self._leader.reject(assignment, attempt.verdict.failure, is_own=attempt.restored is not None)
                if attempt.restored is None:
                    assignment = replace(assignment, parent=None)
                state = None
            elif attempt.verdict.state != "suspended":
                return attempt
        reason = f"{TIMEOUT}the job was suspended in each of {_MOST_SUSPENSIONS} attempts"
        attempt.verdict = Verdict("failed", failure=reason)
        return attempt

    def _alone(self, attempt: Attempt) -> Attempt:
        """Let an evaluation go on with its own worker alone, since it cannot with others."""
        if self._growing and self._leader:
            self._growing.fail(attempt)
        attempt.verdict = Verdict("regrouped", workers=(self._group.index,))
        return attempt

    def _evaluate(self, assignment: Assignment, state: State | None, earlier: float | None) -> Attempt:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        note = _found(self._leader, assignment, state) if self._leader else None
        found: Found = self._group.connect(self._watch.post.alone(), note)
        attempt, task = Attempt(assignment, *self._known(assignment, state, found), earlier), self._task
        attempt.state = state
        seed = task.seed if assignment.seed is None else assignment.seed
        objective = Objective(task.problem, assignment.params)
        with self._watch.evaluation(self._details(attempt)) as watched:
            decide = self._decider(attempt, watched)
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

    def _decider(self, attempt: Attempt, watched: Watched) -> Decide | None:
        leader = self._leader
        if leader is None:
            return None
        decide = partial(leader.decide, attempt, watched)
        return partial(self._growing.decide, decide, leader, attempt) if self._growing else decide

    def _known(self, assignment: Assignment, state: State | None, found: Found) -> tuple[State | None, State | None]:
        """Return the state that this evaluation may go on from, or else the one that it inherits.

        It is the one that the leader has, or in a file. Both are None where not all ranks can read it.
        """
        if found.has_state:
            return broadcast(self._group.own_comm, state), None
        path, is_own, reason = found.path, found.is_own, ""
        if path is None:
            return None, None
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
