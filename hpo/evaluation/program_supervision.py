"""Supervision of a training program on one rank of a worker: the rank's trainer runs it, and its reports are read.

Ranks do not meet at each loss, since a program may report on one of them alone, and any rank may end first. The leader
decides on each loss as soon as it knows it, and calls the evaluation off if it is not to continue.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.draft_store import DraftStore
from hpo.evaluation.leader import Leader
from hpo.evaluation.program_command import Program, advise_on_loss, format_last_lines
from hpo.evaluation.program_reports import Report, ReportMerger, ReportReader
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.step_sync import Decider, StepSync
from hpo.evaluation.step_verdict import TIMEOUT_PREFIX, Step, Verdict
from hpo.evaluation.supervision import Supervision
from hpo.evaluation.trainer_client import TrainerEnd
from hpo.process import clock
from hpo.process.user_frames import UserFrames
from hpo.ranks.communicator import sleep_until
from hpo.ranks.rank_watch import RUN_STOPS, RankWatch
from hpo.ranks.watched_evaluation import WatchedEvaluation

_HARMLESS = ": aborted while it exited, which does not fail an evaluation with a loss"


class ProgramSupervision(Supervision):
    """One evaluation of a program on one rank; its only step is its end."""

    _poll_seconds = 0.1  # seconds between two looks for reports

    def __init__(  # noqa: PLR0913 - all of it is bound once, before an evaluation starts
        self,
        group: RankGroup,
        watch: RankWatch,
        watched: WatchedEvaluation,
        attempt: Attempt,
        leader: Leader | None,
        program: Program,
        overdue_after: float,
    ) -> None:
        meeting = _FinalStepSync(group, watch, watched, self._decide_at_end if leader else None, self)
        # A program has only the lines of its own script, wherever the search file is.
        places = UserFrames(Path(program.script.name))
        super().__init__(group, watched, meeting, attempt, leader, places, overdue_after)
        self._program = program
        self._reports = ReportReader(program.script)
        self._merger = ReportMerger(group.size)
        self.own_reports: list[Report] = []
        self._decided_verdict: Verdict | None = None
        self._remarks: list[str] = []
        group.slot.output.listener = self._reports

    def start_program(
        self, ticket: Mapping[str, Any] | None, known: Mapping[str, Any], continues: bool, is_watched: bool
    ) -> None:
        """Let the trainer run the program; it `continues` from its checkpoint in the evaluation's folder.

        `known` are the trial, the folder and the seed of the evaluation. If it `is_watched`, the trainer sends
        observations: see ``seen``.
        """
        if self._program.script.has_placeholder("folder"):
            known["folder"].mkdir(parents=True, exist_ok=True)
        if self._leader is not None:
            self._attempt.drafts = DraftStore(known["drafts"], self._attempt.assignment.params)
        drafts, path = str(known["drafts"]), self._attempt.path if self._attempt.checkpoint_info else None
        self._trainer.send(
            "run",
            command=self._program.make_command(self._attempt.assignment.params, known, continues),
            is_watched=is_watched,
            environment={
                **(ticket["environment"] if ticket else {}),
                **{f"HPO_{name.upper()}": str(known[name]) for name in ("trial", "folder", "seed")},
                "HPO_METRICS": self._reports.path,
                "HPO_WEIGHTS_DRAFTS": drafts,
                **({"HPO_READS_LINES": "1"} if self._program.script.loss is not None else {}),
                **({"HPO_CHECKPOINT_DRAFTS": drafts} if known["saves"] else {}),
                **({"HPO_CHECKPOINT": str(path.absolute())} if path else {}),
                **(_make_store_environment() if self._group.size == 1 else {}),
            },
        )

    def step(self) -> None:
        """Wait for the end of the program on all ranks, and settle with them how the evaluation ends."""
        super().step()
        self._attempt.checkpoint_info = None  # the leader has decided whether it failed because of its state

    def end(self) -> None:
        """Wait until the program has ended, or kill it; close the file of its reports."""
        super().end()
        self._group.slot.output.listener = None
        self._reports.close()

    def poll_at_end(self, is_done: bool) -> bool:
        """Take in what was reported; on the leader, while it waits for the others, end what is overdue."""
        self._poll()
        if self._leader is not None and clock.now() > self._overdue_at and self._watched.cause is None:
            self._watched.cancel_on_all(f"{TIMEOUT_PREFIX}it went on for longer than --evaluation-timeout")
        return is_done

    def read_last_reports(self) -> None:
        """Take in the end of the file, since the program of this rank has ended."""
        self.own_reports += self._reports.take_last_reports()

    @property
    def remark(self) -> str:
        """A warning about the reports of this rank, if there is one."""
        saves = self._leader is not None and self._watched.cause is None  # one that was cut off may not be at a loss
        return self._reports.find_warning(len(self.own_reports), saves)

    def take_final_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Take in what the ranks have reported until their ends: messages of it may still be on their way.

        Return the steps, in which an abort is a failure if no rank has reported a loss.
        """
        if self._leader is not None and not self._attempt.losses:
            self._restore_losses(Step(self._group.rank))
        self._merger.leader_decides = False  # if it has not reported until now, it will not
        for step in steps:
            self._process_reports(step.rank, self._merger.add_reports(step.rank, step.reports, 0))
        self._remarks = [step.remark for step in steps if step.remark]
        if self._attempt.losses:
            return list(steps)
        return [replace(step, failure=step.aborted or step.failure) for step in steps]

    def _make_step(self, content: Any) -> Step:
        """Return the last step of the program; an abort while it exits is one without a failure."""
        is_harmless = self._watched.cause is None and self._group.slot.output.shows_harmless_abort
        if not content.get("is_abort") or not is_harmless:
            return super()._make_step(content)
        failure, at = content["failure"], content["at"]
        aborted = f"{failure}{self._trainer.describe_last_error()}"
        return Step(self._group.rank, ended=True, aborted=aborted, remark=f"{failure}{_HARMLESS}", at=at)

    def _make_end_step(self, ended: TrainerEnd) -> Step:
        """Return the last step of a trainer that has ended: with status 0 if the program has called `os._exit(0)`."""
        if ended.status != 0:
            return super()._make_end_step(ended)
        cause = self._watched.cause
        is_stopped = cause == RUN_STOPS
        return Step(self._group.rank, failure=cause, own=False, stopped=is_stopped, ended=cause is None, at=time.time())

    def _poll(self) -> None:
        self._watched.clear_event()
        others = self._watched.take_reports() if self._leader is not None else []
        # What a rank reports comes after what the leader has reported for the loss before.
        self._trainer.read_lines()
        new, first = self._reports.take_new_reports(), len(self.own_reports)
        self.own_reports += new
        if self._leader is None:
            if new:
                self._watched.send_report((self._group.rank, new, first))
            return
        for rank, reports, number in [(self._group.rank, new, first), *others]:
            self._process_reports(rank, self._merger.add_reports(rank, reports, number))

    def _process_reports(self, rank: int, reports: Sequence[Report]) -> None:
        """Let the leader decide on losses, one after the other, until the evaluation is not to continue."""
        for report in reports:
            if self._leader is None:
                return
            decided = self._decided_verdict
            if decided is None:
                decided = self._decide_on_report(self._leader, rank, report)
                self._decided_verdict = decided if decided.state != "going" else None
                # A paused program that writes its own checkpoint has until its next report for it.
                if decided.state == "going" or (decided.state == "paused" and not report.checkpoint):
                    continue
            if self._watched.cause is None:
                self._watched.cancel_on_all(decided.failure or f"it is {decided.state}")
            return

    def _decide_on_report(self, leader: Leader, rank: int, report: Report) -> Verdict:
        """Return the leader's verdict on a report of a rank."""
        if report.mistake:
            text = f"rank {rank}: {report.mistake}" if not report.mistake.startswith("rank") else report.mistake
            return Verdict("failed", failure=text, diverged=not math.isfinite(report.loss))
        going = Verdict("going", report.loss, dict(report.metrics))
        self._restore_losses(Step(rank, offers=bool(report.weights), has_saved=bool(report.checkpoint)))
        verdict = leader.decide(self._attempt, going, self._group.slot.output.take_printed())
        since = clock.now()
        self._attempt.record_verdict(verdict)
        leader.keep_drafts(self._attempt, verdict, (report.checkpoint, report.weights), since)
        return replace(verdict, state="complete") if verdict.is_last else verdict

    def _restore_losses(self, step: Step) -> None:
        """Take over the losses of the state from which the program continues, if it has asked for it."""
        attempt, before = self._attempt, self._attempt.restored_count
        attempt.record_step(replace(step, went_on=self._reports.has_read_checkpoint))
        if attempt.restored_count > before and attempt.has_weights and attempt.drafts and attempt.path:
            attempt.drafts.restore_weights(attempt.path)

    def _decide_at_end(self, verdict: Verdict, printed: str) -> Verdict:
        """Return the leader's last verdict, given that on the ends of all ranks."""
        assert self._leader is not None
        if self._decided_verdict is not None and verdict.state != "stopped":
            verdict = replace(self._decided_verdict, loss=None, keep=False)
        elif verdict.state == "failed" and self._attempt.checkpoint_info is not None:
            self._leader.reject_checkpoint(self._attempt.assignment, verdict.failure, is_own=True)
            verdict = Verdict("again", failure=verdict.failure)
        elif verdict.state == "complete" and (self._watched.cause or "").startswith(TIMEOUT_PREFIX):
            verdict = Verdict("failed", failure=self._watched.cause or "")  # the program has caught the exception
        elif verdict.state == "complete" and not self._attempt.losses:
            lines = self._reports.last_lines
            failure, remedy = advise_on_loss(lines, self._program, self._reports.unparsed_text)
            verdict = Verdict("failed", failure=failure, traceback=format_last_lines(lines))
            self._leader.stop_without_losses(
                f"{failure}; the last line is {lines[-1][:100]!r}" if lines else failure, remedy
            )
        if verdict.state != "failed":
            for remark in self._remarks:
                self._leader.warn_once(self._attempt, remark)
        return self._leader.decide(self._attempt, verdict, printed)

    def _send_verdict(self, verdict: Verdict, gathers: bool, is_best: bool = False) -> None:
        """Send nothing: a program is not asked after its end."""

    def _await_copies(self, verdict: Verdict, since: float) -> None:
        """Wait for nothing: the leader has its drafts."""


class _FinalStepSync(StepSync):
    """The meeting of ranks whose programs have ended: others may take as long as they like."""

    def __init__(
        self,
        group: RankGroup,
        watch: RankWatch,
        watched: WatchedEvaluation,
        decide: Decider | None,
        supervision: ProgramSupervision,
    ) -> None:
        super().__init__(group, watch, watched, decide)
        self._supervision = supervision

    def _gather_steps(self, step: Step) -> list[Step]:
        supervision = self._supervision
        supervision.poll_at_end(is_done=False)
        supervision.read_last_reports()
        printed, remark = self._group.slot.output.take_printed(), step.remark or supervision.remark
        step = replace(step, printed=printed, reports=tuple(supervision.own_reports), remark=remark)
        gathering = self._group.own_comm.begin_gather(step)
        sleep_until(lambda: supervision.poll_at_end(gathering.is_done()))
        return supervision.take_final_steps(gathering.unpack_objects())


def _make_store_environment() -> dict[str, str]:
    """Let a program on one rank serve torch's store itself, as if it was not started by torchrun.

    A program that starts its ranks itself, as by `torch.multiprocessing.spawn`, chooses another port for that.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        return {"MASTER_PORT": str(free.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
