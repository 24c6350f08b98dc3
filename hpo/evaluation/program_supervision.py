"""Supervise a training program on one rank: its trainer runs it, and its reports are read.

A program may report on one rank alone, and does not wait for an answer. The leader decides on each
loss when the report arrives. It cancels the evaluation if it must not continue.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.evaluation.leader import Leader
from hpo.evaluation.rank_group import reserve_port
from hpo.evaluation.report_reader import ReportReader
from hpo.evaluation.supervision import RankNews, Supervision
from hpo.evaluation.trainer_client import TrainerEnd
from hpo.evaluation.verdict import FailureKind, RankEnd, State, Verdict
from hpo.process import clock
from hpo.process.messages import GroupTicket, ObjectiveEnd, Report
from hpo.process.user_frames import UserFrames
from hpo.script_objective import find_epochs
from hpo.text_format import format_list

_HARMLESS = ": aborted while it exited, which does not fail an evaluation with a loss"
_EARLIER = "which an earlier evaluation has probably written"
_MAX_SHOWN_LINES = 5
_REPEATED = (
    "it has resumed, and repeated only epochs whose losses had been recorded. If these are new "
    "epochs, --step must find a number that continues after a resume"
)


class ProgramSupervision(Supervision):
    """Supervises one evaluation of a program on one rank."""

    _poll_seconds = 0.1  # seconds between two checks for reports
    _reserved_port: socket.socket | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seconds_to_next_loss = 0.0
        self._seconds_for_peers = math.inf
        assert self._context.program is not None
        self._program = self._context.program
        # Only the files next to the script are code of the user; the search file may be elsewhere.
        self._user_frames = UserFrames(Path(self._program.script.name))
        self._reports = ReportReader(self._program.script)
        self._merger = ReportMerger(self._group.size)
        self._own_reports: list[Report] = []
        self._has_repeated = False
        # Of the leader's program, if it resumes from its own files: its checkpoint at the start,
        # and whether it writes each checkpoint before the report of its loss; None if not known.
        self._values: Mapping[str, Any] = {}
        self._first_checkpoint: tuple[str, int, int] | None = None
        self._saves_before_report: bool | None = None
        self._group.slot.output.listener = self._reports

    def start_objective(self, ticket: GroupTicket | None, values: Mapping[str, Any]) -> None:
        """Send the command line and the environment of the program to the trainer."""
        script = self._program.script
        start = self._attempt.start
        self._values = values
        self._first_checkpoint = self._identify_checkpoint()
        if script.has_placeholder("folder"):
            values["folder"].mkdir(parents=True, exist_ok=True)
        params = self._attempt.assignment.params
        environment = {
            **(ticket.environment if ticket else {}),
            **{f"HPO_{name.upper()}": str(values[name]) for name in ("trial", "folder", "seed")},
            "HPO_METRICS": self._reports.path,
            "HPO_WEIGHTS_DRAFTS": str(values["drafts"]),
        }
        if self._group.size == 1:
            # The program behaves as if torchrun had not started it: it starts torch's store itself,
            # and may set another port if it starts several processes, for example with
            # `torch.multiprocessing.spawn`. It may take minutes to begin to use the reserved port.
            self._reserved_port = reserve_port()
            environment["MASTER_PORT"] = str(self._reserved_port.getsockname()[1])
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if script.pattern is not None:
            environment["HPO_READS_LINES"] = "1"
        if values["saves"]:
            environment["HPO_CHECKPOINT_DRAFTS"] = str(values["drafts"])
        if start.is_own and start.path is not None:
            environment["HPO_CHECKPOINT"] = str(start.path.absolute())
        command = self._program.make_command(params, values, start.own_file)
        self._reports.epochs = find_epochs(command)
        if "SLURM_JOB_ID" in os.environ:
            # Scripts for srun read these. The launcher's own are those of another process.
            environment["SLURM_PROCID"] = str(self._group.rank)
            environment["SLURM_LOCALID"] = environment.get("LOCAL_RANK", "0")
        self._trainer.send(
            "run",
            command=command,
            since=self._context.began_at,
            is_traced=self._context.is_traced,
            environment=environment,
        )

    def _take_news(self) -> RankNews:
        self._trainer.read_lines()
        news = RankNews(
            self._group.rank, reports=self._reports.take_new_reports(), first=len(self._own_reports)
        )
        self._own_reports += news.reports
        return news

    def _process_reports(self, news: RankNews) -> None:
        """Let the leader decide on each loss, until the evaluation must not continue."""
        assert self._leader is not None
        for report in self._merger.add_reports(news.rank, news.reports, news.first):
            if self._is_repeated(report):
                self._has_repeated = True
                self._leader.record_resumption(self._attempt)
                continue
            is_first = not self._attempt.verdict.ends_evaluation
            if is_first:
                self._attempt.skip_missing_losses(self._count_missing(report))
                self._decide_on_report(self._leader, news.rank, report)
            elif report.mistake.startswith("ranks ") and not self._attempt.is_aborted:
                self._leader.warn_once(self._attempt.assignment, report.mistake)
            if not self._attempt.verdict.ends_evaluation:
                continue
            decided = self._attempt.verdict.conclude()
            # A paused program that writes its own file after its report has until the next report.
            is_unsaved = not report.checkpoint and not self._saves_before_report
            if is_first and decided.state == State.PAUSED and is_unsaved:
                continue
            if self._watched.cause is None:
                self._watched.cancel_on_all(decided.failure or f"it is {decided.state.value}")
            return

    def _is_repeated(self, report: Report) -> bool:
        """Return whether the loss of this epoch was recorded before the program was resumed."""
        last = self._attempt.start.progress.epoch
        if last is None or report.epoch is None or report.mistake:
            return False
        return report.epoch <= last

    def _count_missing(self, report: Report) -> int:
        """Return how many epochs have no loss, before the first report of a resumed program.

        It may have saved an epoch, and been stopped before the loss of the epoch was recorded. The
        number is only known if the program numbers its epochs one by one, from 0 or 1.
        """
        progress = self._attempt.start.progress
        if progress.epoch is None or report.epoch is None or report.mistake:
            return 0
        is_numbered = len(progress.losses) - progress.epoch in (0, 1)
        return report.epoch - progress.epoch - 1 if is_numbered else 0

    def _decide_on_report(self, leader: Leader, rank: int, report: Report) -> None:
        """Let the leader decide on a report, and keep the drafts that belong to it."""
        if report.mistake and not report.mistake.startswith("rank"):
            report = replace(report, mistake=f"rank {rank}: {report.mistake}")
        report = replace(report, has_resumed=self._reports.has_read_checkpoint)
        if self._saves_before_report is None:
            self._saves_before_report = self._identify_checkpoint() != self._first_checkpoint
        verdict = self._decide(leader, report)
        since = clock.now()
        assert self._attempt.drafts is not None
        checkpoint = self._attempt.drafts.take_named(report.checkpoint)
        weights = self._attempt.drafts.take_named(report.weights)
        leader.keep_drafts(self._attempt, verdict, checkpoint, weights, since)

    def _identify_checkpoint(self) -> tuple[str, int, int] | None:
        """Return the program's own checkpoint, with time and size; None if there is none."""
        if self._leader is None or not self._program.script.can_resume:
            return None
        path = self._program.find_checkpoint(self._attempt.assignment.params, self._values)
        if path is None:
            return None
        status = path.stat()
        return str(path), status.st_mtime_ns, status.st_size

    # The end of the program

    def _complete_end(self, end: RankEnd) -> RankEnd:
        has_ended = self._watched.cause is None and end.failure is None
        self._own_reports += self._reports.take_last_reports(has_ended)
        # A cancelled program may have saved a checkpoint and not yet reported its loss.
        is_whole = self._leader is not None and self._watched.cause is None
        remark = end.remark or self._reports.find_warning(len(self._own_reports), is_whole)
        return replace(
            end,
            reports=tuple(self._own_reports),
            remark=remark or _describe_shared_files(end.earlier_files),
            has_resumed=self._reports.has_read_checkpoint,
        )

    def _make_end(self, end: ObjectiveEnd) -> RankEnd:
        """Return the end of the program. For an abort at exit, `_conclude` decides if it failed."""
        is_harmless = self._watched.cause is None and self._group.slot.output.shows_harmless_abort
        if not end.is_abort or not is_harmless:
            return super()._make_end(end)
        aborted = f"{end.failure}{self._trainer.describe_last_error()}"
        return RankEnd(
            self._group.rank, aborted=aborted, remark=f"{end.failure}{_HARMLESS}", at=end.at
        )

    def _describe_crash(self, ended: TrainerEnd) -> RankEnd:
        """Return the end of a trainer that has ended. Status 0 is that of `os._exit(0)`."""
        if ended.status != 0:
            return super()._describe_crash(ended)
        end = ObjectiveEnd(at=time.time())
        if self._watched.cause is None:
            return self._make_end(end)
        return self._make_failed_end(end, FailureKind.CANCELLED)

    def _conclude(self, leader: Leader, ends: Sequence[RankEnd]) -> Verdict:
        """Merge the remaining reports of all ranks, and return the final verdict.

        A program that aborted while it exited has failed only if no rank has reported a loss.
        """
        # The leader's program has ended, and reports no more losses.
        self._merger.leader_decides = False
        for end in ends:
            self._process_reports(RankNews(end.rank, reports=end.reports))
        self._attempt.reports = max(len(end.reports) for end in ends)
        if not self._attempt.losses:
            ends = [replace(end, failure=end.aborted or end.failure) for end in ends]
        verdict = super()._conclude(leader, ends)
        if verdict.state == State.COMPLETE and not self._attempt.losses:
            return self._fail_without_losses(leader, ends)
        if verdict.state == State.COMPLETE and self._has_repeated and not self._attempt.has_loss:
            leader.warn_once(self._attempt.assignment, _REPEATED)
        if verdict.state != State.FAILED:
            for remark in [end.remark for end in ends if end.remark]:
                leader.warn_once(self._attempt.assignment, remark)
        return verdict

    def _fail_without_losses(self, leader: Leader, ends: Sequence[RankEnd]) -> Verdict:
        """Return the verdict on a program that has reported no loss. It may stop the run."""
        lines = self._reports.last_lines
        failure, remedy = self._program.explain_missing_loss(lines, self._reports.unparsed)
        if self._reports.cut_line and self._program.script.pattern is not None:
            failure += f"; {self._reports.cut_line}"
        earlier = [path for end in ends for path in end.earlier_files]
        if earlier:
            failure += f"; it has read {_shorten_path(earlier[0])}, {_EARLIER}"
        if not lines:
            leader.stop_without_losses(failure, remedy)
            return Verdict(State.FAILED, failure=failure)
        leader.stop_without_losses(f"{failure}; the last line is {lines[-1][:100]!r}", remedy)
        shown = [f"    {line[:200]}" for line in lines[-_MAX_SHOWN_LINES:]]
        printed = "\n".join(["The last lines that it printed:", *shown])
        return Verdict(State.FAILED, failure=failure, traceback=printed)

    def _finish(self, end: RankEnd) -> None:
        """Wait until the program has ended, or kill it, and close the file of its reports."""
        super()._finish(end)
        if self._reserved_port is not None:
            self._reserved_port.close()
        self._group.slot.output.listener = None
        self._reports.close()


def _describe_shared_files(files: Mapping[str, bool]) -> str:
    """Return a warning about files that a program has read, and that have changed since then."""
    changed = [_shorten_path(path) for path, has_changed in files.items() if has_changed]
    if not changed:
        return ""
    return (
        f"it has read {format_list(changed)}, {_EARLIER}. If it resumes from there, its losses do "
        "not belong to its hyperparameters: write checkpoints to {folder}"
    )


def _shorten_path(path: str) -> str:
    """Return the path relative to the working directory, if the file is in it."""
    folder = Path.cwd()
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path


class ReportMerger:
    """Merges the reports of all ranks of a worker.

    For each loss, the report of one rank counts. The losses of the other ranks must agree with it.

    While `leader_decides` is true, the report of the leader counts, since drafts belong to it.
    Other ranks' reports of the same loss wait. A waiting rank that reports another loss shows that
    the leader has skipped one. Then `leader_decides` becomes false, and the first report of each
    loss counts.
    """

    def __init__(self, size: int) -> None:
        self._counts = [0] * size
        self._losses: list[tuple[int, float]] = []
        # Rank, report and number of the report.
        self._early_reports: list[tuple[int, Report, int]] = []
        self.leader_decides = True

    def add_reports(self, rank: int, reports: Sequence[Report], first: int) -> list[Report]:
        """Add reports of a rank, and return the reports that count, which may describe mistakes.

        There are `first` earlier reports of this rank. Reports that were added before are skipped.
        """
        new = []
        for number, report in enumerate(reports, first):
            new += self._add_report(rank, report, number)
        if rank == 0 or not self.leader_decides:
            new += self._release_early()
        return new

    def _release_early(self) -> list[Report]:
        early = self._early_reports
        self._early_reports = []
        return [counted for arguments in early for counted in self._add_report(*arguments)]

    def _add_report(self, rank: int, report: Report, number: int) -> list[Report]:
        if number < self._counts[rank]:
            return []
        is_first = number >= len(self._losses)
        if self.leader_decides and rank > 0 and is_first and not report.mistake:
            waiting = [early for early_rank, _, early in self._early_reports if early_rank == rank]
            if not waiting:
                self._early_reports.append((rank, report, number))
            if not waiting or number in waiting:
                return []
            self.leader_decides = False
            return [*self._release_early(), *self._add_report(rank, report, number)]
        self._counts[rank] = number + 1
        if report.mistake or is_first:
            self._losses.append((rank, report.loss))
            return [report]
        first_rank, loss = self._losses[number]
        if math.isclose(report.loss, loss, rel_tol=1e-3, abs_tol=1e-12):
            return []
        mistake = (
            f"ranks {first_rank} and {rank} reported different losses, {loss:g} and "
            f"{report.loss:g}, as loss {number + 1}: report the mean over all ranks, or on one "
            "rank only. If each rank trains alone, use --ranks-per-worker 1"
        )
        return [Report(report.loss, mistake=mistake)]
