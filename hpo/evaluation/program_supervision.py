"""Supervise a training program on one rank of a worker: its trainer runs it, and its reports are read.

Ranks do not synchronize at each loss, since a program may report on one rank alone, and any rank
may end first. The leader decides on each loss when the report arrives. It cancels the evaluation if
it must not continue.
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
from hpo.evaluation.host_network import reserve_port
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
    """Supervises one evaluation of a program on one rank.

    The ranks agree on a verdict only once, after the program has ended on all of them.
    """

    _poll_seconds = 0.1  # seconds between two checks for reports

    def __init__(  # noqa: PLR0913 - all arguments are bound once, before an evaluation starts
        self,
        group: RankGroup,
        watch: RankWatch,
        watched: WatchedEvaluation,
        attempt: Attempt,
        leader: Leader | None,
        program: Program,
        overdue_after: float,
    ) -> None:
        step_sync = _FinalStepSync(group, watch, watched, self._decide_at_end if leader else None, self)
        # Only the files next to the script are code of the user; the search file may be elsewhere.
        user_frames = UserFrames(Path(program.script.name))
        super().__init__(group, watched, step_sync, attempt, leader, user_frames, overdue_after)
        self._program = program
        self._reports = ReportReader(program.script)
        self._merger = ReportMerger(group.size)
        self.own_reports: list[Report] = []
        self._decided_verdict: Verdict | None = None
        self._remarks: list[str] = []
        self._reserved_port: socket.socket | None = None
        group.slot.output.listener = self._reports

    def start_program(
        self, ticket: Mapping[str, Any] | None, known: Mapping[str, Any], continues: bool, is_watched: bool
    ) -> None:
        """Let the trainer (process that runs the program for this rank) start the program.

        Args:
            ticket: Parameters of a new process group; None if the trainer is in its group already.
            known: Trial, folder, seed and drafts of the evaluation.
            continues: Whether the program resumes from checkpoint files in the evaluation's folder.
            is_watched: Whether the trainer sends a trace of the evaluation.
        """
        if self._program.script.has_placeholder("folder"):
            known["folder"].mkdir(parents=True, exist_ok=True)
        if self._leader is not None:
            self._attempt.drafts = DraftStore(known["drafts"], self._attempt.assignment.params)
        self._is_watched = is_watched
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
                **self._make_store_environment(),
            },
        )

    def _make_store_environment(self) -> dict[str, str]:
        """Return environment variables with which a program on a single rank starts torch's store itself.

        The program then behaves as if torchrun had not started it. It may set another port if it starts several
        processes, for example with `torch.multiprocessing.spawn`. The port is reserved, since a program may take
        minutes to begin to use it.
        """
        if self._group.size > 1:
            return {}
        self._reserved_port = reserve_port()
        return {"MASTER_PORT": str(self._reserved_port.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}

    def step(self) -> None:
        """Wait until the program has ended on all ranks, and agree with the other ranks on the verdict."""
        super().step()
        self._attempt.checkpoint_info = None  # The leader has checked whether its checkpoint caused a failure.

    def end(self) -> None:
        """End the supervision: wait until the program has ended, or kill it, and close the file of its reports."""
        super().end()
        if self._reserved_port is not None:
            self._reserved_port.close()
        self._group.slot.output.listener = None
        self._reports.close()

    def poll_at_end(self, is_done: bool) -> bool:
        """Read new reports while this rank waits for its peers, and return `is_done`.

        On the leader, cancel an evaluation that takes too long.
        """
        self._poll()
        if self._leader is not None and clock.now() > self._overdue_at and self._watched.cause is None:
            self._watched.cancel_on_all(f"{TIMEOUT_PREFIX}it ran for longer than --evaluation-timeout")
        return is_done

    def read_last_reports(self) -> None:
        """Read the remaining reports of this rank; call it after its program has ended."""
        self.own_reports += self._reports.take_last_reports()

    @property
    def remark(self) -> str:
        """A warning about the reports of this rank; empty if there is none."""
        # A cancelled program may have saved a checkpoint and not yet reported its loss.
        saves = self._leader is not None and self._watched.cause is None
        return self._reports.find_warning(len(self.own_reports), saves)

    def take_final_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Merge all reports in the final steps of all ranks, some of which have not been merged yet.

        Returns:
            The steps. A program that aborted while it exited has failed only if no rank has reported a loss.
        """
        if self._leader is not None and not self._attempt.losses:
            self._restore_losses(Step(self._group.rank))
        self._merger.leader_decides = False  # The leader's program has ended, and reports no more losses.
        for step in steps:
            self._process_reports(step.rank, self._merger.add_reports(step.rank, step.reports, 0))
        self._remarks = [step.remark for step in steps if step.remark]
        if self._attempt.losses:
            return list(steps)
        return [replace(step, failure=step.aborted or step.failure) for step in steps]

    def _make_step(self, content: Any) -> Step:
        """Return the final step of the program. `take_final_steps` decides whether an abort at exit is a failure."""
        is_harmless = self._watched.cause is None and self._group.slot.output.shows_harmless_abort
        if not content.get("is_abort") or not is_harmless:
            return super()._make_step(content)
        failure, at = content["failure"], content["at"]
        aborted = f"{failure}{self._trainer.describe_last_error()}"
        return Step(self._group.rank, ended=True, aborted=aborted, remark=f"{failure}{_HARMLESS}", at=at)

    def _make_end_step(self, ended: TrainerEnd) -> Step:
        """Return the final step of a trainer that has ended. Status 0 means that the program called `os._exit(0)`."""
        if ended.status != 0:
            return super()._make_end_step(ended)
        cause = self._watched.cause
        is_stopped = cause == RUN_STOPS
        return Step(self._group.rank, failure=cause, own=False, stopped=is_stopped, ended=cause is None, at=time.time())

    def _poll(self) -> None:
        self._watched.clear_event()
        others = self._watched.take_reports() if self._leader is not None else []
        # A rank reports a loss only after the leader has reported the loss before, so the leader's are handled first.
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
        """Let the leader decide on one loss after the other, until the evaluation must not continue."""
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
        """Restore the losses of the checkpoint from which the program resumes, if it has read it."""
        attempt, before = self._attempt, self._attempt.restored_count
        attempt.record_step(replace(step, went_on=self._reports.has_read_checkpoint))
        if attempt.restored_count > before and attempt.has_weights and attempt.drafts and attempt.path:
            attempt.drafts.restore_weights(attempt.path)

    def _decide_at_end(self, verdict: Verdict, printed: str) -> Verdict:
        """Return the leader's final verdict. `verdict` is the verdict on the final steps of all ranks."""
        assert self._leader is not None
        if self._decided_verdict is not None and verdict.state != "stopped":
            verdict = replace(self._decided_verdict, loss=None, keep=False)
        elif verdict.state == "failed" and self._attempt.checkpoint_info is not None:
            self._leader.reject_checkpoint(self._attempt.assignment, verdict.failure, is_own=True)
            verdict = Verdict("again", failure=verdict.failure)
        elif verdict.state == "complete" and (self._watched.cause or "").startswith(TIMEOUT_PREFIX):
            verdict = Verdict("failed", failure=self._watched.cause or "")  # The program has caught the exception.
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
        """Send no message: the program has ended."""

    def _await_copies(self, verdict: Verdict, since: float) -> None:
        """Return at once: the leader has the files that the program has written, and needs no copies."""


class _FinalStepSync(StepSync):
    """Synchronizes ranks whose programs have ended. A rank waits for the other programs without a time limit."""

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
        gathering = self._group.comm.begin_gather(step)
        sleep_until(lambda: supervision.poll_at_end(gathering.is_done()))
        return supervision.take_final_steps(gathering.unpack_objects())
