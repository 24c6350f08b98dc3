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
from hpo.evaluation.draft_store import reset_drafts
from hpo.evaluation.elastic import Claim, ElasticController, Invitation, NextTask
from hpo.evaluation.leader import Leader
from hpo.evaluation.program_command import Program
from hpo.evaluation.program_supervision import ProgramSupervision
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.step_sync import Decider, StepSync
from hpo.evaluation.step_verdict import TIMEOUT_PREFIX, Verdict
from hpo.evaluation.supervision import Supervision
from hpo.evaluation.worker_groups import WorkerGroups
from hpo.process import clock
from hpo.process.user_frames import UserFrames
from hpo.ranks.rank_watch import RankWatch
from hpo.ranks.watched_evaluation import WatchedEvaluation
from hpo.store.checkpoints import CheckpointInfo, read_checkpoint_info
from hpo.store.evaluations import Assignment

_MAX_SUSPENSIONS = 20  # of the job in one evaluation, each of which made a rank wait in vain

EvaluationResult = tuple[dict[str, Any], float, Mapping[str, float]]  # hyperparameters, loss and metrics


def _may_fail_due_to_ranks(attempt: Attempt) -> bool:
    """Tell whether an evaluation may have failed because of the number of its ranks; the same on all ranks."""
    verdict = attempt.verdict
    return verdict.state == "failed" and not verdict.failure.startswith(TIMEOUT_PREFIX) and not verdict.diverged


@dataclass(frozen=True)
class EvaluationContext:
    """What all evaluations of a run have in common, on all ranks.

    `places` finds the user's lines in stacks; `seed` is for individuals without one. `trials` is the directory in which
    evaluations may have folders of their own, whose names begin with `prefix`. `program` is set if a program is run;
    its drafts are in the directory `states`, and its checkpoints are kept if it `saves`.
    """

    user_frames: UserFrames
    seed: int
    trial_folder: Path
    prefix: str = ""
    program: Program | None = None
    checkpoint_folder: Path = Path()
    keeps_checkpoints: bool = True

    def describe_evaluation(self, assignment: Assignment) -> dict[str, Any]:
        """Return what a program may know of an evaluation; trial, folder and drafts are of its first attempt."""
        name = f"{self.prefix}{assignment.root}"
        return {
            "trial": assignment.root,
            "folder": self.trial_folder.absolute() / name,
            "seed": self.seed if assignment.seed is None else assignment.seed,
            "drafts": self.checkpoint_folder.absolute() / f".{name}",
            "saves": self.keeps_checkpoints,
        }


@dataclass(frozen=True)
class StartingPoint:
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
        context: EvaluationContext,
        group: RankGroup,
        watch: RankWatch,
        leader: Leader | None = None,
        worker_groups: WorkerGroups | None = None,
        elastic: ElasticController | None = None,
        is_traced: bool = False,
    ) -> None:
        self._context = context
        self._own_group = self._group = group
        self._watch = watch
        self._worker_leader = leader
        self._worker_groups = worker_groups
        self._elastic = elastic
        self._is_traced = is_traced
        self._is_clean = False
        self.trace: dict[str, Any] = {}

    @property
    def _leader(self) -> Leader | None:
        """The leader of the evaluation that this rank is at, if this rank is its leader's."""
        return self._worker_leader if self._group.rank == 0 else None

    def __call__(self, claim: Claim | None) -> EvaluationResult | None:
        """Evaluate the individual that the leader claims, and return its hyperparameters, its loss and its metrics.

        The loss is the lowest that the objective has yielded or returned, and infinite if the evaluation has failed on
        any rank; the metrics are those that came with it. Returns None where the leader has claimed nothing, or the run
        stops; this worker has helped others by then, if workers do so. `claim` is None on all ranks but the leader.
        """
        while isinstance(told := self._own_group.own_comm.bcast(self._claim_next(claim)), Invitation):
            self._evaluate_in_groups(told.assignment, told.workers)
        if told is None:
            return None
        attempt = self._evaluate_in_groups(told, (self._own_group.index,))
        if attempt.verdict.state != "stopped":
            return told.params, attempt.loss, attempt.metrics
        return self(None if claim is None else lambda: None) if self._worker_groups else None

    def _claim_next(self, claim: Claim | None) -> NextTask:
        if claim is None:
            return None
        return self._elastic.claim_next(claim) if self._elastic else claim()

    def _evaluate_in_groups(self, assignment: Assignment, workers: tuple[int, ...]) -> Attempt:
        """Evaluate an individual with these workers, and go on with others as told, until it ends or this one parts."""
        earlier: float | None = None
        saved, started = 0, clock.now()
        while True:
            if self._elastic and workers[0] == self._own_group.index:
                self._elastic.begin_evaluation(assignment, workers, saved)
            with (
                self._worker_groups.form_group(workers)
                if self._worker_groups
                else nullcontext(self._own_group) as self._group
            ):
                attempt = self._evaluate_with_retries(assignment, earlier)
                if attempt.verdict.state != "regrouped":
                    self._finish_evaluation(attempt, started)
            self._group = self._own_group
            workers, earlier, saved = (
                attempt.verdict.workers,
                attempt.earlier_seconds,
                len(attempt.losses) * attempt.verdict.save,
            )
            if self._own_group.index not in workers:
                return attempt

    def _finish_evaluation(self, attempt: Attempt, started: float) -> None:
        """Record how an evaluation has ended, and let its trainers go that cannot be used again."""
        if self._elastic and self._group.index == self._own_group.index:
            self._elastic.release_reserved()
        if self._leader:
            self._leader.finish_evaluation(attempt, attempt.earlier_seconds + clock.now() - started)
        if attempt.drafts is not None:
            attempt.drafts.close()
        self._group.slot.finish_evaluation(self._is_clean)

    def _evaluate_with_retries(self, assignment: Assignment, earlier: float | None) -> Attempt:
        """Evaluate an individual, and again where it was not its own mistake that it has failed.

        So is one that cannot go on from its state: it begins again. One that fails in a team is to go on with its own
        worker alone. All ranks have the seconds of `earlier` sessions if it goes on.
        """
        before = ""
        for _ in range(_MAX_SUSPENSIONS):
            attempt = self._run_attempt(assignment, earlier)
            verdict = attempt.verdict
            earlier = attempt.earlier_seconds if attempt.has_loss else earlier
            if self._group is not self._own_group and _may_fail_due_to_ranks(attempt):
                return self._return_to_own_worker(attempt)
            if verdict.state == "failed" and attempt.has_checkpoint and not verdict.diverged:
                if self._leader:
                    self._leader.reject_checkpoint(
                        assignment, verdict.failure, is_own=attempt.checkpoint_info is not None
                    )
                if attempt.checkpoint_info is None:
                    assignment = replace(assignment, parent=None)
            elif verdict.state not in ("suspended", "again"):
                return attempt
            elif verdict.state == "again" and before:
                attempt.verdict = replace(verdict, state="failed")
                return attempt
            before = verdict.failure
        reason = f"{TIMEOUT_PREFIX}the job was suspended in each of {_MAX_SUSPENSIONS} attempts"
        attempt.verdict = Verdict("failed", failure=reason)
        return attempt

    def _return_to_own_worker(self, attempt: Attempt) -> Attempt:
        """Let an evaluation go on with its own worker alone, since it cannot with others."""
        if self._elastic and self._leader:
            self._elastic.record_failure(attempt)
        attempt.verdict = Verdict("regrouped", workers=(self._group.index,))
        return attempt

    def _run_attempt(self, assignment: Assignment, earlier: float | None) -> Attempt:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        ticket, found = self._group.connect(self._find_start(assignment) if self._leader else None)
        attempt = Attempt(assignment, *self._read_checkpoint_info(assignment, found), found.path, earlier)
        if found.losses is not None:
            attempt.restore_losses(found.losses, found.seconds, {})
        attempt.saves_own_checkpoints = self._context.program is not None and bool(self._context.program.script.resume)
        overdue_after = self._leader.limits.evaluation_timeout if self._leader else math.inf
        if self._context.program is None:  # an objective is ended at its next loss, if there is one soon
            overdue_after += self._group.patience
        with self._watch.watch_evaluation() as watched:
            supervision = self._start_supervision(watched, attempt, overdue_after, ticket)
            while attempt.has_next_step:
                supervision.step()
            supervision.end()
        if attempt.is_aborted:
            attempt.loss = math.inf
        self._is_clean, self.trace = supervision.is_clean, supervision.trace
        return attempt

    def _start_supervision(
        self, watched: WatchedEvaluation, attempt: Attempt, overdue_after: float, ticket: dict[str, Any] | None
    ) -> Supervision:
        """Let this rank's trainer begin, and return what supervises it."""
        self._group.slot.output.forget_errors()
        group, known, program = (
            self._group,
            self._context.describe_evaluation(attempt.assignment),
            self._context.program,
        )
        if program is not None:
            running = ProgramSupervision(group, self._watch, watched, attempt, self._leader, program, overdue_after)
            running.start_program(ticket, known, attempt.restored_count > 0, self._is_traced)
            return running
        meeting = StepSync(group, self._watch, watched, self._make_decider(attempt))
        places, is_team = self._context.user_frames, group is not self._own_group
        supervision = Supervision(group, watched, meeting, attempt, self._leader, places, overdue_after, is_team)
        supervision.start_objective(ticket, known["seed"], known["folder"], self._is_traced)
        return supervision

    def _find_start(self, assignment: Assignment) -> StartingPoint:
        """Return what an evaluation may begin with, on the leader."""
        assert self._leader is not None
        program = self._context.program
        path, is_own = self._leader.find_start(assignment)
        if program is None:
            return StartingPoint(path, is_own)
        known = self._context.describe_evaluation(assignment)
        if (kept := reset_drafts(known["drafts"], path)) is not None:
            return StartingPoint(kept, is_own)
        losses, seconds = self._leader.find_losses(assignment) if program.script.resume else ([], 0.0)
        continues = bool(losses) and program.can_resume(assignment.params, known)
        return StartingPoint(losses=losses, seconds=seconds) if continues else StartingPoint()

    def _make_decider(self, attempt: Attempt) -> Decider | None:
        leader = self._leader
        if leader is None:
            return None
        decide = partial(leader.decide, attempt)
        return partial(self._elastic.decide, decide, leader, attempt) if self._elastic else decide

    def _read_checkpoint_info(
        self, assignment: Assignment, found: StartingPoint
    ) -> tuple[CheckpointInfo | None, CheckpointInfo | None]:
        """Return what is known of the state that this evaluation may go on from, or else of the one that it inherits.

        Both are None where not all ranks can read it.
        """
        path, is_own, reason, about = found.path, found.is_own, "", None
        if path is None:
            return None, None
        try:
            about = read_checkpoint_info(path, assignment.params if is_own else None, is_checked=False)
        except ValueError as error:
            reason = f"rank {self._group.rank}: {error}"
        reasons = [reason for reason in self._group.own_comm.allgather(reason) if reason]
        if reasons:
            if self._leader:
                self._leader.reject_checkpoint(assignment, reasons[0], is_own)
            return None, None
        return (about, None) if is_own else (None, about)
