"""Supervise an objective function on one rank: answer its reports, and record the copies that its trainer makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.evaluation.leader import Leader
from hpo.evaluation.report import Report
from hpo.evaluation.supervision import Supervision
from hpo.evaluation.verdict import Verdict
from hpo.process import clock
from hpo.process.channel import Message


class FunctionSupervision(Supervision):
    """Supervises one evaluation of an objective function on one rank.

    The trainers of all ranks agree on each report. Only the trainer of the leader sends it, and waits for the answer.
    """

    _awaited: tuple[Verdict, float] | None = None  # a verdict that requires copies, and the time at which they began

    def start_objective(self, ticket: dict[str, Any] | None, seed: int, folder: Path) -> None:
        """Let the trainer start the objective, after it has joined the process group of `ticket`, if that is given."""
        attempt, path = self._attempt, str(self._attempt.path) if self._attempt.path else None
        self._trainer.send(
            "evaluate",
            params=attempt.assignment.params,
            seed=seed,
            trial=attempt.assignment.root,
            folder=str(folder),
            ticket=ticket,
            free_memory=self._group.slot.first_free_memory,
            restored=path if attempt.checkpoint_info is not None else None,
            inherited=path if attempt.parent_info is not None else None,
            is_watched=self._is_watched,
            is_compared=self._group.compares_collectives,
        )

    def _handle_message(self, message: Message) -> None:
        if message.kind == "report" and self._leader is not None:
            self._answer_report(self._leader, Report(**message.content))
        elif message.kind == "kept" and self._leader is not None and self._awaited is not None:
            verdict, since = self._awaited
            self._awaited = None
            self._leader.record_copies(self._attempt, verdict, message.content, since)
        else:
            super()._handle_message(message)

    def _answer_report(self, leader: Leader, report: Report) -> None:
        """Decide on a report, and send the trainer the answer, with what it must copy."""
        attempt = self._attempt
        verdict = leader.decide(attempt, report, self._take_printed())
        is_best = verdict.loss is not None and verdict.loss < attempt.loss
        attempt.record_verdict(verdict)
        if verdict.state != "going" or verdict.is_last:
            self._decided = replace(verdict, state="complete") if verdict.state == "going" else verdict
        saves = verdict.save and verdict.state in ("going", "paused")
        if verdict.keep or saves:
            self._awaited = (verdict, clock.now())
        self._trainer.send(
            "answer",
            goes_on=verdict.state == "going" and not verdict.is_last,
            is_best=is_best,
            keep=verdict.keep,
            save=saves,
            about=leader.describe_checkpoint(attempt) if saves else None,
            draft=leader.make_draft_path(attempt) if saves else "",
        )

    def _finish(self) -> None:
        super()._finish()
        if self._awaited is not None and self._leader is not None:
            self._leader.record_lost_copies(self._attempt, self._awaited[0], self._crash)
