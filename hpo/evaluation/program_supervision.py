"""Supervise a training program on one rank of a worker: its trainer runs it, and its reports are read.

A program may report on one rank alone, and does not wait for an answer. The leader decides on each loss when the report
arrives. It cancels the evaluation if it must not continue.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.host_network import reserve_port
from hpo.evaluation.leader import Leader
from hpo.evaluation.program_command import Program, advise_on_loss, format_last_lines
from hpo.evaluation.program_reports import ReportMerger, ReportReader
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.report import Report
from hpo.evaluation.supervision import RankNews, Supervision
from hpo.evaluation.trainer_client import TrainerEnd
from hpo.evaluation.verdict import RankEnd, State, Verdict
from hpo.process import clock
from hpo.process.user_frames import UserFrames
from hpo.ranks.rank_watch import RUN_STOPS, RankWatch
from hpo.ranks.watched_evaluation import WatchedEvaluation

_HARMLESS = ": aborted while it exited, which does not fail an evaluation with a loss"


class ProgramSupervision(Supervision):
    """Supervises one evaluation of a program on one rank."""

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
        is_watched: bool,
    ) -> None:
        # Only the files next to the script are code of the user; the search file may be elsewhere.
        user_frames = UserFrames(Path(program.script.name))
        super().__init__(group, watch, watched, attempt, leader, user_frames, overdue_after, is_watched)
        self._program = program
        self._reports = ReportReader(program.script)
        self._merger = ReportMerger(group.size)
        self._own_reports: list[Report] = []
        self._reserved_port: socket.socket | None = None
        group.slot.output.listener = self._reports

    def start_program(self, ticket: Mapping[str, Any] | None, known: Mapping[str, Any], continues: bool) -> None:
        """Let the trainer (process that runs the program for this rank) start the program.

        Args:
            ticket: Parameters of a new process group; None if the trainer is in its group already.
            known: Trial, folder, seed and drafts of the evaluation.
            continues: Whether the program resumes from checkpoint files in the evaluation's folder.
        """
        if self._program.script.has_placeholder("folder"):
            known["folder"].mkdir(parents=True, exist_ok=True)
        drafts, path = str(known["drafts"]), self._attempt.path if self._attempt.checkpoint_info else None
        self._trainer.send(
            "run",
            command=self._program.make_command(self._attempt.assignment.params, known, continues),
            is_watched=self._is_watched,
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

    def _take_reports(self) -> tuple[Sequence[Report], int]:
        self._trainer.read_lines()
        new, first = self._reports.take_new_reports(), len(self._own_reports)
        self._own_reports += new
        return new, first

    def _process_reports(self, news: RankNews) -> None:
        """Let the leader decide on one loss after the other, until the evaluation must not continue."""
        assert self._leader is not None
        for report in self._merger.add_reports(news.rank, news.reports, news.first):
            decided = self._decided or self._decide_on_report(self._leader, news.rank, report)
            # A paused program that writes its own checkpoint has until its next report for it.
            is_first = self._decided is None
            self._decided = decided if decided.state != State.RUNNING else None
            if decided.state == State.RUNNING or (is_first and decided.state == State.PAUSED and not report.checkpoint):
                continue
            if self._watched.cause is None:
                self._watched.cancel_on_all(decided.failure or f"it is {decided.state.value}")
            return

    def _decide_on_report(self, leader: Leader, rank: int, report: Report) -> Verdict:
        if report.mistake and not report.mistake.startswith("rank"):
            report = replace(report, mistake=f"rank {rank}: {report.mistake}")
        report = replace(report, has_resumed=self._reports.has_read_checkpoint)
        verdict = leader.decide(self._attempt, report, self._take_printed())
        since = clock.now()
        self._attempt.record_verdict(verdict)
        assert self._attempt.drafts is not None
        take = self._attempt.drafts.take_named
        checkpoint, weights = take(report.checkpoint), take(report.weights)
        leader.keep_drafts(self._attempt, verdict, checkpoint, weights, since)
        return replace(verdict, state=State.COMPLETE) if verdict.is_last else verdict

    # The end of the program

    def _complete_end(self, end: RankEnd) -> RankEnd:
        self._own_reports += self._reports.take_last_reports()
        # A cancelled program may have saved a checkpoint and not yet reported its loss.
        saves = self._leader is not None and self._watched.cause is None
        remark = end.remark or self._reports.find_warning(len(self._own_reports), saves)
        has_resumed = self._reports.has_read_checkpoint
        return replace(end, reports=tuple(self._own_reports), remark=remark, has_resumed=has_resumed)

    def _make_end(self, content: Mapping[str, Any]) -> RankEnd:
        """Return the end of the program. `_conclude` decides whether an abort at exit is a failure."""
        is_harmless = self._watched.cause is None and self._group.slot.output.shows_harmless_abort
        if not content.get("is_abort") or not is_harmless:
            return super()._make_end(content)
        failure, at = content["failure"], content["at"]
        aborted = f"{failure}{self._trainer.describe_last_error()}"
        return RankEnd(self._group.rank, aborted=aborted, remark=f"{failure}{_HARMLESS}", at=at)

    def _describe_crash(self, ended: TrainerEnd) -> RankEnd:
        """Return the end of a trainer that has ended. Status 0 means that the program called `os._exit(0)`."""
        if ended.status != 0:
            return super()._describe_crash(ended)
        cause = self._watched.cause
        return RankEnd(self._group.rank, failure=cause, own=False, stopped=cause == RUN_STOPS, at=time.time())

    def _conclude(self, leader: Leader, ends: Sequence[RankEnd]) -> Verdict:
        """Merge the reports of all ranks, some of which have not been merged yet, and return the final verdict.

        A program that aborted while it exited has failed only if no rank has reported a loss.
        """
        self._attempt.record_ends(ends)
        self._merger.leader_decides = False  # The leader's program has ended, and reports no more losses.
        for end in ends:
            self._process_reports(RankNews(end.rank, reports=end.reports))
        if not self._attempt.losses:
            ends = [replace(end, failure=end.aborted or end.failure) for end in ends]
        verdict = super()._conclude(leader, ends)
        if verdict.state == State.COMPLETE and not self._attempt.losses:
            verdict = self._explain_missing_loss(leader)
        if verdict.state != State.FAILED:
            for remark in [end.remark for end in ends if end.remark]:
                leader.warn_once(self._attempt, remark)
        return verdict

    def _explain_missing_loss(self, leader: Leader) -> Verdict:
        lines = self._reports.last_lines
        failure, remedy = advise_on_loss(lines, self._program, self._reports.unparsed_text)
        reason = f"{failure}; the last line is {lines[-1][:100]!r}" if lines else failure
        leader.stop_without_losses(reason, remedy)
        return Verdict(State.FAILED, failure=failure, traceback=format_last_lines(lines))

    def _finish(self) -> None:
        """Wait until the program has ended, or kill it, and close the file of its reports."""
        super()._finish()
        if self._reserved_port is not None:
            self._reserved_port.close()
        self._group.slot.output.listener = None
        self._reports.close()
