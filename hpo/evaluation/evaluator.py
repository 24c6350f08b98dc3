"""Evaluate individuals on one worker.

The trainer of each rank runs the objective. The leader decides on each report, and the ranks agree
on the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpo.evaluation.attempt import Attempt, EvaluationContext, StartingPoint
from hpo.evaluation.draft_store import DraftStore, reset_drafts
from hpo.evaluation.leader import Leader
from hpo.evaluation.program_supervision import ProgramSupervision
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.supervision import Supervision
from hpo.evaluation.verdict import TIMEOUT_PREFIX, State, Verdict
from hpo.process import clock
from hpo.ranks.rank_watch import RankWatch
from hpo.store.checkpoints import read_checkpoint_info
from hpo.store.evaluations import Assignment, Progress
from hpo.store.run_dir import set_folder_aside

# Suspensions of the job in one evaluation, each of which made a rank time out.
_MAX_SUSPENSIONS = 20


@dataclass
class Evaluator:
    """Evaluates individuals on one worker.

    The leader calls `evaluate` and `end`, and the other ranks `follow`.
    """

    _context: EvaluationContext
    _group: RankGroup
    _watch: RankWatch
    _leader: Leader | None = None
    """Decides on losses, on the first rank of the worker. None on its other ranks."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """The trace of the latest evaluation, if the context is traced."""

    def evaluate(self, assignment: Assignment) -> Attempt:
        """Evaluate a claimed individual on all ranks of the worker; call it on the leader.

        The loss of the returned attempt is infinite if the evaluation has failed on any rank.
        """
        self._group.comm.bcast(assignment)
        return self._evaluate(assignment)

    def end(self) -> None:
        """Let the other ranks return from `follow`; call it on the leader after all evaluations."""
        self._group.comm.bcast(None)

    def follow(self) -> None:
        """Take part in evaluations until the leader calls `end`; call it on the other ranks."""
        while (assignment := self._group.comm.bcast(None)) is not None:
            self._evaluate(assignment)

    def _evaluate(self, assignment: Assignment) -> Attempt:
        """Evaluate an individual, and repeat this if the objective did not cause the failure.

        All ranks have the same verdict, so they repeat it together. `Leader.decide_on_repetition`
        limits repetitions after failures, and rejects the checkpoint if it may be the cause: the
        next attempt then starts without it. So only suspensions can use up all attempts here.
        """
        started = clock.now()
        if assignment.tests is not None:
            # The test of a suspected worker needs fresh trainers.
            self._group.slot.discard_trainer()
        attempt = self._run_attempt(assignment, None)
        for _ in range(_MAX_SUSPENSIONS - 1):
            if attempt.verdict.state != State.REPEATED:
                break
            attempt.close_drafts()
            attempt = self._run_attempt(attempt.assignment, attempt)
        if attempt.verdict.state == State.REPEATED:
            reason = f"{TIMEOUT_PREFIX}the job was suspended in each of {_MAX_SUSPENSIONS} attempts"
            attempt.verdict = Verdict(State.FAILED, failure=reason)
        if self._leader:
            self._leader.finish_evaluation(attempt, attempt.earlier_seconds + clock.now() - started)
        attempt.close_drafts()
        return attempt

    def _run_attempt(self, assignment: Assignment, previous: Attempt | None) -> Attempt:
        """Run one attempt on this rank, until a verdict of all ranks ends it."""
        program = self._context.program
        values = self._context.describe_evaluation(assignment, self._group.size)
        ticket, start = self._group.connect(
            self._find_start(self._leader, assignment, values, previous) if self._leader else None
        )
        attempt = Attempt(assignment, self._check_start(assignment, start), previous)
        if self._leader is not None:
            attempt.drafts = DraftStore(values["drafts"] if program else None, assignment.params)
        attempt.saves_own_checkpoints = program is not None and program.script.can_resume
        self._group.slot.output.forget_errors()
        supervise = ProgramSupervision if program is not None else Supervision
        with self._watch.watch_evaluation() as watched:
            supervision = supervise(self._context, self._group, watched, attempt, self._leader)
            supervision.start_objective(ticket, values)
            supervision.supervise()
        if attempt.is_aborted:
            attempt.loss = math.inf
        self.trace = supervision.trace
        return attempt

    def _find_start(
        self,
        leader: Leader,
        assignment: Assignment,
        values: Mapping[str, Any],
        previous: Attempt | None,
    ) -> StartingPoint:
        """Return the checkpoint with which an evaluation may begin; call it on the leader.

        A program that starts from the beginning has an empty folder, since it may read its files by
        itself. The folder of an earlier attempt gets another name.
        """
        program = self._context.program
        start = leader.find_start(assignment)
        if program is None:
            return start
        if (kept := reset_drafts(values["drafts"], start.path)) is not None:
            return replace(start, path=kept)
        if program.script.can_resume and not (previous and previous.rejects_own_file):
            file = program.find_checkpoint(assignment.params, values)
            progress = leader.find_progress(assignment) if file is not None else Progress()
            if progress.losses:
                return StartingPoint(own_file=file, progress=progress)
        set_folder_aside(values["folder"])
        return StartingPoint()

    def _check_start(self, assignment: Assignment, start: StartingPoint) -> StartingPoint:
        """Read the content of the checkpoint. If a rank cannot, all ranks start without it."""
        if start.path is None:
            return start
        reason = ""
        params = assignment.params if start.is_own else None
        try:
            start = replace(start, info=read_checkpoint_info(start.path, params, is_checked=False))
        except ValueError as error:
            reason = f"rank {self._group.rank}: {error}"
        reasons = [reason for reason in self._group.comm.allgather(reason) if reason]
        if not reasons:
            return start
        if self._leader:
            self._leader.reject_checkpoint(assignment, reasons[0], start.is_own)
        return StartingPoint()
