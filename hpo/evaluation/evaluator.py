"""One individual, one loss: the objective run by all trainers of a worker, whose supervisors agree how it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.drafts import begin_drafts
from hpo.evaluation.group import Group
from hpo.evaluation.growing import Claim, Growing, Invitation, Told
from hpo.evaluation.leader import Leader
from hpo.evaluation.meeting import Decide, Meeting
from hpo.evaluation.program import Program
from hpo.evaluation.program_supervision import ProgramSupervision
from hpo.evaluation.supervision import Supervision
from hpo.evaluation.teams import Teams
from hpo.evaluation.verdict import TIMEOUT, Verdict
from hpo.process import clock
from hpo.process.place import Places
from hpo.ranks.watch import Watch
from hpo.ranks.watched import Watched
from hpo.store.evaluations import Assignment
from hpo.store.states import About, read_about

_MOST_SUSPENSIONS = 20  # of the job in one evaluation, each of which made a rank wait in vain

Evaluated = tuple[dict[str, Any], float, Mapping[str, float]]  # hyperparameters, loss and metrics


def _may_be_its_ranks(attempt: Attempt) -> bool:
    """Tell whether an evaluation may have failed because of the number of its ranks; the same on all ranks."""
    verdict = attempt.verdict
    return verdict.state == "failed" and not verdict.failure.startswith(TIMEOUT) and not verdict.diverged


@dataclass(frozen=True)
class Terms:
    """What all evaluations of a run have in common, on all ranks.

    `places` finds the user's lines in stacks; `seed` is for individuals without one. `trials` is the directory in which
    evaluations may have folders of their own, whose names begin with `prefix`. `program` is set if a program is run;
    its drafts are in the directory `states`, and its checkpoints are kept if it `saves`.
    """

    places: Places
    seed: int
    trials: Path
    prefix: str = ""
    program: Program | None = None
    states: Path = Path()
    saves: bool = True

    def known(self, assignment: Assignment) -> dict[str, Any]:
        """Return what a program may know of an evaluation; trial, folder and drafts are of its first attempt."""
        name = f"{self.prefix}{assignment.root}"
        return {
            "trial": assignment.root,
            "folder": self.trials.absolute() / name,
            "seed": self.seed if assignment.seed is None else assignment.seed,
            "drafts": self.states.absolute() / f".{name}",
            "saves": self.saves,
        }


@dataclass(frozen=True)
class Found:
    """In which file the state is that an evaluation may begin with, and whether it is its own.

    A program continues by itself if there are `losses` that it had before, in so many seconds.
    """

    path: Path | None = None
    is_own: bool = True
    losses: Sequence[float] | None = None
    seconds: float = 0.0


class Evaluator:
    """Evaluates individuals on one worker; called by all of the worker's ranks at the same time.

    `leader` is None on all ranks but the worker's leader. With `worker_groups`, workers help each other, and leaders
    know how by `growing`. If evaluations are `watched`, trainers say what they have seen: see ``seen``.
    """

    def __init__(  # noqa: PLR0913 - all of it is bound once, before an evaluation starts
        self,
        terms: Terms,
        group: Group,
        watch: Watch,
        leader: Leader | None = None,
        teams: Teams | None = None,
        growing: Growing | None = None,
        is_watched: bool = False,
    ) -> None:
        self._terms = terms
        self._own = self._group = group
        self._watch = watch
        self._worker_leader = leader
        self._teams = teams
        self._growing = growing
        self._is_watched = is_watched
        self._is_clean = False
        self.seen: dict[str, Any] = {}

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
        attempt = self._in_teams(told, (self._own.index,))
        if attempt.verdict.state != "stopped":
            return told.params, attempt.loss, attempt.metrics
        return self(None if claim is None else lambda: None) if self._teams else None

    def _next(self, claim: Claim | None) -> Told:
        if claim is None:
            return None
        return self._growing.next(claim) if self._growing else claim()

    def _in_teams(self, assignment: Assignment, workers: tuple[int, ...]) -> Attempt:
        """Evaluate an individual with these workers, and go on with others as told, until it ends or this one parts."""
        earlier: float | None = None
        saved, started = 0, clock.now()
        while True:
            if self._growing and workers[0] == self._own.index:
                self._growing.begin(assignment, workers, saved)
            with self._teams.of(workers) if self._teams else nullcontext(self._own) as self._group:
                attempt = self._judged(assignment, earlier)
                if attempt.verdict.state != "regrouped":
                    self._finish(attempt, started)
            self._group = self._own
            workers, earlier, saved = (
                attempt.verdict.workers,
                attempt.earlier,
                len(attempt.losses) * attempt.verdict.save,
            )
            if self._own.index not in workers:
                return attempt

    def _finish(self, attempt: Attempt, started: float) -> None:
        """Record how an evaluation has ended, and let its trainers go that cannot be used again."""
        if self._growing and self._group.index == self._own.index:
            self._growing.end()
        if self._leader:
            self._leader.finish(attempt, attempt.earlier + clock.now() - started)
        if attempt.drafts is not None:
            attempt.drafts.close()
        self._group.slot.finish(self._is_clean)

    def _judged(self, assignment: Assignment, earlier: float | None) -> Attempt:
        """Evaluate an individual, and again where it was not its own mistake that it has failed.

        So is one that cannot go on from its state: it begins again. One that fails in a team is to go on with its own
        worker alone. All ranks have the seconds of `earlier` sessions if it goes on.
        """
        before = ""
        for _ in range(_MOST_SUSPENSIONS):
            attempt = self._evaluate(assignment, earlier)
            verdict = attempt.verdict
            earlier = attempt.earlier if attempt.has_loss else earlier
            if self._group is not self._own and _may_be_its_ranks(attempt):
                return self._alone(attempt)
            if verdict.state == "failed" and attempt.has_been_given and not verdict.diverged:
                if self._leader:
                    self._leader.reject(assignment, verdict.failure, is_own=attempt.restored is not None)
                if attempt.restored is None:
                    assignment = replace(assignment, parent=None)
            elif verdict.state not in ("suspended", "again"):
                return attempt
            elif verdict.state == "again" and before:
                attempt.verdict = replace(verdict, state="failed")
                return attempt
            before = verdict.failure
        reason = f"{TIMEOUT}the job was suspended in each of {_MOST_SUSPENSIONS} attempts"
        attempt.verdict = Verdict("failed", failure=reason)
        return attempt

    def _alone(self, attempt: Attempt) -> Attempt:
        """Let an evaluation go on with its own worker alone, since it cannot with others."""
        if self._growing and self._leader:
            self._growing.fail(attempt)
        attempt.verdict = Verdict("regrouped", workers=(self._group.index,))
        return attempt

    def _evaluate(self, assignment: Assignment, earlier: float | None) -> Attempt:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        ticket, found = self._group.connect(self._find(assignment) if self._leader else None)
        attempt = Attempt(assignment, *self._known(assignment, found), found.path, earlier)
        if found.losses is not None:
            attempt.continue_from(found.losses, found.seconds, {})
        attempt.saves_itself = self._terms.program is not None and bool(self._terms.program.script.resume)
        overdue_after = self._leader.limits.evaluation_timeout if self._leader else math.inf
        if self._terms.program is None:  # an objective is ended at its next loss, if there is one soon
            overdue_after += self._group.patience
        with self._watch.evaluation() as watched:
            supervision = self._begin(watched, attempt, overdue_after, ticket)
            while attempt.goes_on:
                supervision.step()
            supervision.end()
        if attempt.was_broken_off:
            attempt.loss = math.inf
        self._is_clean, self.seen = supervision.is_clean, supervision.seen
        return attempt

    def _begin(
        self, watched: Watched, attempt: Attempt, overdue_after: float, ticket: dict[str, Any] | None
    ) -> Supervision:
        """Let this rank's trainer begin, and return what supervises it."""
        self._group.slot.output.forget_errors()
        group, known, program = self._group, self._terms.known(attempt.assignment), self._terms.program
        if program is not None:
            running = ProgramSupervision(group, self._watch, watched, attempt, self._leader, program, overdue_after)
            running.start(ticket, known, attempt.taken_over > 0, self._is_watched)
            return running
        meeting = Meeting(group, self._watch, watched, self._decider(attempt))
        places, is_team = self._terms.places, group is not self._own
        supervision = Supervision(group, watched, meeting, attempt, self._leader, places, overdue_after, is_team)
        supervision.begin(ticket, known["seed"], known["folder"], self._is_watched)
        return supervision

    def _find(self, assignment: Assignment) -> Found:
        """Return what an evaluation may begin with, on the leader."""
        assert self._leader is not None
        program = self._terms.program
        path, is_own = self._leader.find(assignment)
        if program is None:
            return Found(path, is_own)
        known = self._terms.known(assignment)
        if (kept := begin_drafts(known["drafts"], path)) is not None:
            return Found(kept, is_own)
        losses, seconds = self._leader.find_losses(assignment) if program.script.resume else ([], 0.0)
        continues = bool(losses) and program.can_continue(assignment.params, known)
        return Found(losses=losses, seconds=seconds) if continues else Found()

    def _decider(self, attempt: Attempt) -> Decide | None:
        leader = self._leader
        if leader is None:
            return None
        decide = partial(leader.decide, attempt)
        return partial(self._growing.decide, decide, leader, attempt) if self._growing else decide

    def _known(self, assignment: Assignment, found: Found) -> tuple[About | None, About | None]:
        """Return what is known of the state that this evaluation may go on from, or else of the one that it inherits.

        Both are None where not all ranks can read it.
        """
        path, is_own, reason, about = found.path, found.is_own, "", None
        if path is None:
            return None, None
        try:
            about = read_about(path, assignment.params if is_own else None, is_checked=False)
        except ValueError as error:
            reason = f"rank {self._group.rank}: {error}"
        reasons = [reason for reason in self._group.own_comm.allgather(reason) if reason]
        if reasons:
            if self._leader:
                self._leader.reject(assignment, reasons[0], is_own)
            return None, None
        return (about, None) if is_own else (None, about)
