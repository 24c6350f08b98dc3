"""Evaluate individuals on one worker.

The trainer of each rank runs the objective. The leader decides on each report, and the ranks agree
on the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpo.evaluation.attempt import Attempt, StartingPoint
from hpo.evaluation.draft_store import DraftStore, reset_drafts
from hpo.evaluation.leader import Leader
from hpo.evaluation.program_command import Program
from hpo.evaluation.program_supervision import ProgramSupervision
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.supervision import FunctionSupervision, Supervision
from hpo.evaluation.verdict import TIMEOUT_PREFIX, State, Verdict
from hpo.process import clock
from hpo.process.messages import GroupTicket
from hpo.process.user_frames import UserFrames
from hpo.ranks.rank_watch import RankWatch, WatchedEvaluation
from hpo.store.checkpoints import read_checkpoint_info
from hpo.store.evaluations import Assignment
from hpo.store.run_dir import RunDir

# Suspensions of the job in one evaluation, each of which made a rank time out.
_MAX_SUSPENSIONS = 20


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    params: Mapping[str, Any]
    loss: float
    """The lowest loss of the objective; infinite if the evaluation has failed on any rank."""
    metrics: Mapping[str, float]
    """The metrics of that loss."""
    is_stopped: bool
    """Whether the run stops, so that the evaluation has no result."""


@dataclass(frozen=True)
class EvaluationContext:
    """Settings that all evaluations of a run share, on all ranks."""

    user_frames: UserFrames
    """Finds the lines of the user's code in stacks."""
    seed: int
    """Seed of individuals that have no seed of their own."""
    files: RunDir
    """Directory in which each evaluation may have a folder, and in which a program writes its drafts."""
    prefix: str = ""
    """Prefix of the names of these folders and drafts."""
    program: Program | None = None
    """The program of the run; None if the objective is a function."""
    keeps_checkpoints: bool = True
    """Whether checkpoints of a program are kept."""

    def describe_evaluation(self, assignment: Assignment) -> dict[str, Any]:
        """Return the values that a program may use; all trials of an individual have the same values."""
        name = f"{self.prefix}{assignment.root}"
        return {
            "trial": assignment.root,
            "folder": self.files.trial_folders.absolute() / name,
            "seed": self.seed if assignment.seed is None else assignment.seed,
            "drafts": self.files.checkpoints.absolute() / f".{name}",
            "saves": self.keeps_checkpoints,
        }


class Evaluator:
    """Evaluates individuals on one worker. The leader calls `evaluate` and `end`, and the other ranks `follow`.

    Args:
        context: Settings that all evaluations share.
        group: The ranks of this worker.
        watch: Handles signals and messages of this rank in a thread.
        leader: Decides on losses, on the first rank of the worker. None on its other ranks.
        is_traced: Whether trainers record a trace of each evaluation. The attribute `trace` has the
            latest trace.
    """

    def __init__(
        self,
        context: EvaluationContext,
        group: RankGroup,
        watch: RankWatch,
        leader: Leader | None = None,
        is_traced: bool = False,
    ) -> None:
        self._context = context
        self._group = group
        self._watch = watch
        self._leader = leader
        self._is_traced = is_traced
        self._is_clean = False
        self.trace: dict[str, Any] = {}

    def evaluate(self, assignment: Assignment) -> Evaluated:
        """Evaluate a claimed individual on all ranks of the worker; call it on the leader."""
        self._group.comm.bcast(assignment)
        attempt = self._evaluate(assignment)
        return Evaluated(
            assignment.params, attempt.loss, attempt.metrics, attempt.verdict.state == State.STOPPED
        )

    def end(self) -> None:
        """Let the other ranks return from `follow`; call it on the leader when nothing is left to evaluate."""
        self._group.comm.bcast(None)

    def follow(self) -> None:
        """Take part in the evaluations of the leader until it calls `end`; call it on the other ranks."""
        while (assignment := self._group.comm.bcast(None)) is not None:
            self._evaluate(assignment)

    def _evaluate(self, assignment: Assignment) -> Attempt:
        started = clock.now()
        if assignment.tests is not None:
            # The test of a suspected worker needs fresh trainers.
            self._group.slot.discard_trainer()
        values = self._context.describe_evaluation(assignment)
        attempt = self._evaluate_with_retries(assignment, values)
        if self._leader:
            self._leader.finish_evaluation(attempt, attempt.earlier_seconds + clock.now() - started)
        attempt.close_drafts()
        self._group.slot.finish_evaluation(self._is_clean)
        return attempt

    def _evaluate_with_retries(self, assignment: Assignment, values: Mapping[str, Any]) -> Attempt:
        """Evaluate an individual, and retry if the objective did not cause the failure.

        All ranks have the same verdict, so they retry together. `Leader.decide_on_retry` limits
        retries after failures, and rejects the checkpoint if it may be the cause: the next attempt
        then starts without it. Here only suspensions of the job are counted.
        """
        earlier: float | None = None  # the argument `earlier_seconds` of `Attempt`
        previous_failure = ""
        for _ in range(_MAX_SUSPENSIONS):
            attempt = self._run_attempt(assignment, values, earlier, previous_failure)
            if attempt.verdict.state not in (State.SUSPENDED, State.REPEATED):
                return attempt
            attempt.close_drafts()
            assignment = attempt.assignment
            earlier = attempt.earlier_seconds if attempt.has_loss else earlier
            previous_failure = attempt.verdict.failure
        reason = f"{TIMEOUT_PREFIX}the job was suspended in each of {_MAX_SUSPENSIONS} attempts"
        attempt.verdict = Verdict(State.FAILED, failure=reason)
        return attempt

    def _run_attempt(
        self,
        assignment: Assignment,
        values: Mapping[str, Any],
        earlier: float | None,
        previous_failure: str,
    ) -> Attempt:
        """Run one attempt at an evaluation on this rank, until a verdict of all ranks ends it."""
        program = self._context.program
        ticket, start = self._group.connect(
            self._find_start(self._leader, assignment, values) if self._leader else None
        )
        attempt = Attempt(
            assignment, self._check_start(assignment, start), earlier, previous_failure
        )
        if self._leader is not None:
            attempt.drafts = DraftStore(values["drafts"] if program else None, assignment.params)
        attempt.saves_own_checkpoints = program is not None and bool(program.script.resume)
        with self._watch.watch_evaluation() as watched:
            supervision = self._start_supervision(watched, attempt, ticket, values)
            supervision.supervise()
        if attempt.is_aborted:
            attempt.loss = math.inf
        self._is_clean = supervision.is_clean
        self.trace = supervision.trace
        if self._leader and supervision.remains:
            text = (
                f"it leaves GPU memory behind, so its trainers are replaced: {supervision.remains}"
            )
            self._leader.warn_once(attempt, text, "remains")
        return attempt

    def _start_supervision(
        self,
        watched: WatchedEvaluation,
        attempt: Attempt,
        ticket: GroupTicket | None,
        values: Mapping[str, Any],
    ) -> Supervision:
        self._group.slot.output.forget_errors()
        program = self._context.program
        common = (self._group, watched, attempt, self._leader)
        if program is not None:
            running = ProgramSupervision(*common, program, self._is_traced)
            running.start_program(ticket, values)
            return running
        supervision = FunctionSupervision(*common, self._context.user_frames, self._is_traced)
        supervision.start_objective(ticket, values["seed"], values["folder"])
        return supervision

    def _find_start(
        self, leader: Leader, assignment: Assignment, values: Mapping[str, Any]
    ) -> StartingPoint:
        """Return the checkpoint with which an evaluation may begin; call it on the leader."""
        program = self._context.program
        start = leader.find_start(assignment)
        if program is None:
            return start
        if (kept := reset_drafts(values["drafts"], start.path)) is not None:
            return replace(start, path=kept)
        losses, seconds = leader.find_losses(assignment) if program.script.resume else ([], 0.0)
        continues = bool(losses) and program.can_resume(assignment.params, values)
        return StartingPoint(losses=losses, seconds=seconds) if continues else StartingPoint()

    def _check_start(self, assignment: Assignment, start: StartingPoint) -> StartingPoint:
        """Read what the checkpoint contains. If a rank fails to read it, all ranks start without it."""
        if start.path is None:
            return start
        reason = ""
        try:
            info = read_checkpoint_info(
                start.path, assignment.params if start.is_own else None, is_checked=False
            )
            start = replace(start, info=info)
        except ValueError as error:
            reason = f"rank {self._group.rank}: {error}"
        reasons = [reason for reason in self._group.comm.allgather(reason) if reason]
        if not reasons:
            return start
        if self._leader:
            self._leader.reject_checkpoint(assignment, reasons[0], start.is_own)
        return StartingPoint()
