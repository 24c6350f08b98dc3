"""Supervise an objective function on one rank: answer its reports, and keep the copies that its trainer makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.evaluation.draft_store import Draft
from hpo.evaluation.leader import Leader
from hpo.evaluation.report import Report
from hpo.evaluation.supervision import SECONDS_TO_ACKNOWLEDGE, Supervision
from hpo.evaluation.verdict import TIMEOUT_PREFIX, State, Verdict
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
            self._watch_for_hang()
            self._answer_report(self._leader, Report(**message.content))
        elif message.kind == "reported":
            self._watch_for_hang()
        elif message.kind == "kept" and self._leader is not None and self._awaited is not None:
            self._keep_copies(self._leader, self._awaited, message)
        else:
            super()._handle_message(message)

    def _poll(self) -> None:
        super()._poll()
        # Twice the limit of a collective, so that a collective which waits for a peer fails first, and names the peer.
        limit = 2 * self._group.patience
        if self._awaited is not None and clock.now() > self._awaited[1] + limit and self._watched.cause is None:
            self._watched.cancel_on_all(f"{TIMEOUT_PREFIX}an offered function has not returned after {limit:g} s")

    @property
    def _seconds_for_peers(self) -> float:
        # The trainers have agreed on the end, and only have to gather what the objective has offered.
        return self._group.patience + SECONDS_TO_ACKNOWLEDGE

    def _keep_copies(self, leader: Leader, awaited: tuple[Verdict, float], message: Message) -> None:
        """Keep the copies of weights and checkpoint that the trainer has made in memory."""
        drafts = dict(zip(message["kinds"], map(Draft.from_descriptor, message.descriptors), strict=True))
        verdict, since = awaited
        self._awaited = None
        errors = message["errors"]
        leader.warn_about_copies(self._attempt, errors.get("weights", ""), errors.get("checkpoint", ""))
        leader.keep_drafts(self._attempt, verdict, drafts.get("checkpoint"), drafts.get("weights"), since)

    def _answer_report(self, leader: Leader, report: Report) -> None:
        """Decide on a report, and send the trainer the answer, with what it must copy."""
        attempt = self._attempt
        verdict = leader.decide(attempt, report, self._take_printed())
        attempt.record_verdict(verdict)
        if verdict.state != State.RUNNING or verdict.is_last:
            self._decided = replace(verdict, state=State.COMPLETE) if verdict.state == State.RUNNING else verdict
        if verdict.keep or verdict.save:
            self._awaited = (verdict, clock.now())
        continues = verdict.state == State.RUNNING and not verdict.is_last
        self._trainer.send("answer", continues=continues, keeps_weights=verdict.keep, saves_checkpoint=verdict.save)

    def _finish(self) -> None:
        super()._finish()
        is_complete = self._attempt.verdict.state == State.COMPLETE
        if self._awaited is not None and self._leader is not None and is_complete:
            reason = self._crash or "they were not copied in time"
            self._leader.warn_about_lost_weights(self._attempt, self._awaited[0], reason)
