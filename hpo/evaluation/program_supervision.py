"""Supervise a training program on one rank: its trainer runs it, and its reports are read.

A program may report on one rank alone, and does not wait for an answer. The leader decides on each
loss when the report arrives. It cancels the evaluation if it must not continue.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpo.evaluation.leader import Leader
from hpo.evaluation.rank_group import reserve_port
from hpo.evaluation.supervision import RankNews, Supervision
from hpo.evaluation.trainer_client import TrainerEnd
from hpo.evaluation.verdict import FailureKind, RankEnd, State, Verdict
from hpo.problem import Problem
from hpo.process import clock
from hpo.process.messages import GroupTicket, ObjectiveEnd, Report
from hpo.process.user_frames import UserFrames
from hpo.script_objective import SCORE, Script, find_epochs, propose_loss_pattern
from hpo.text_format import format_list

_HARMLESS = ": aborted while it exited, which does not fail an evaluation with a loss"
_CUT_LINE = "a line of more than 64 KiB was not searched for --loss: print the loss on its own line"
# The end of the text before a number that is usually maximised, such as "Acc@1 ".
_SCORE_NAME = re.compile(
    r"(?<![^\W_])(?:acc(?:uracy)?|f1|[a-z_]*(?:auc|bleu|score)|r2|mIoU|mAP)(?:@\d+)?(?![a-z])"
    r"(?:(?!loss|err)\D)*$",
    re.IGNORECASE,
)
# A counter of batches, such as [3/79], but not of epochs.
_COUNTER = re.compile(r"(?<![\w./])(\d+) ?/ ?(\d+)(?![\w./])[\])]?")
_EPOCH_NAME = re.compile(r"\bep(?:och)?s?\W*$", re.IGNORECASE)
_EARLIER = "which an earlier evaluation has probably written"
_ADVICE_ON_STEP = "give --step, a regular expression of the epoch, so that its last loss counts"
_MAX_LAST_LINES = 20
_MAX_SHOWN_LINES = 5
_SECONDS_FOR_A_LINE = 1.0
_NOTE_NAMES = ("checkpoint", "weights", "asked")
_DRAFT_NAME = re.compile(r"\d+-\d+")  # process and number


@dataclass(frozen=True)
class Program:
    """The training program that a run starts for each evaluation."""

    script: Script
    settings: Mapping[str, Any]
    """Values of the settings, by name."""
    hyperparameters: Sequence[str]
    """Names of all hyperparameters."""
    search_file: str = ""
    """The file that names the program; empty if it was given on the command line."""

    @classmethod
    def from_problem(cls, problem: Problem) -> Program | None:
        """Return the program of a problem; None if its objective is a function."""
        script = problem.file.script
        path = str(problem.file.path)
        if script is None:
            return None
        search_file = "" if path == str(Path(script.name)) else path
        return cls(script, problem.setting_values, list(problem.space.parameters), search_file)

    def make_command(
        self, params: Mapping[str, Any], known: Mapping[str, Any], checkpoint: Path | None = None
    ) -> list[str]:
        """Return the command line of an evaluation.

        `known` has its trial, folder, seed and ranks. It resumes from `checkpoint`, its own file,
        if any.
        """
        others = {**self.settings, **known}
        absent = [name for name in self.hyperparameters if name not in params]
        command = list(self.script.make_arguments(params, others, absent))
        if checkpoint is not None:
            values = {**others, "checkpoint": checkpoint, **params}
            command += self.script.make_resume_arguments(values)
        return command

    def find_checkpoint(self, params: Mapping[str, Any], known: Mapping[str, Any]) -> Path | None:
        """Return the checkpoint that the program has written to the evaluation's folder, if any."""
        return self.script.find_checkpoint({**self.settings, **known, **params})


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
            is_first = not self._attempt.verdict.ends_evaluation
            if is_first:
                self._decide_on_report(self._leader, news.rank, report)
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
        is_whole = self._watched.cause is None and end.failure is None
        self._own_reports += self._reports.take_last_reports(is_whole)
        # A cancelled program may have saved a checkpoint and not yet reported its loss.
        saves = self._leader is not None and self._watched.cause is None
        remark = end.remark or self._reports.find_warning(len(self._own_reports), saves)
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
            lines = self._reports.last_lines
            earlier = [path for end in ends for path in end.earlier_files]
            failure, remedy = _advise_on_loss(lines, self._program, self._reports.unparsed)
            if self._reports.has_cut_line and self._program.script.pattern is not None:
                failure += f"; {_CUT_LINE}"
            if earlier:
                failure += f"; it has read {_shorten_path(earlier[0])}, {_EARLIER}"
            reason = f"{failure}; the last line is {lines[-1][:100]!r}" if lines else failure
            leader.stop_without_losses(reason, remedy)
            shown = "".join(f"    {line[:200]}\n" for line in lines[-_MAX_SHOWN_LINES:]).rstrip()
            printed = f"The last lines that it printed:\n{shown}" if shown else ""
            verdict = Verdict(State.FAILED, failure=failure, traceback=printed)
        if verdict.state != State.FAILED:
            for remark in [end.remark for end in ends if end.remark]:
                leader.warn_once(self._attempt, remark)
        return verdict

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


def _advise_on_loss(lines: Sequence[str], program: Program, unparsed: str) -> tuple[str, str]:
    """Return why no loss was found in a program's output, and the option that the user must change.

    `unparsed` is the latest match of the loss pattern that is not a number, in its line.
    """
    script = program.script
    found_none = "no loss was found in what the program printed"
    where = f" in the Script of {program.search_file}" if program.search_file else ""
    if unparsed:
        name = script.pattern_name
        failure = f"no loss was found: --{name} has matched {unparsed}, which is not a number"
        return failure, f"another {name}={where}" if where else f"another --{name}"
    if script.maximize is None and (pattern := propose_loss_pattern(lines)):
        option = f"loss={pattern!r}{where}" if where else f"--loss {shlex.quote(pattern)}"
        return f"{found_none}; {option} would read it", option
    name = script.pattern_name
    option = f"{name}=REGEX{where}" if where else f"--{name} REGEX"
    if script.pattern is not None:
        return f"{found_none}: no line matches '{script.pattern}'", f"another {option}"
    option = f"{option} for the lines that it prints"
    return (
        f"no loss was found: call hpo.report(loss) in the program, or give {option}",
        "hpo.report(loss) or --loss",
    )


@contextmanager
def _limit_time() -> Iterator[None]:
    """Raise TimeoutError after a second, by a signal, which interrupts regular expressions too."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_FOR_A_LINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class _PrintedLoss:
    """A loss that was found in a line, with what was found or saved since the previous one."""

    loss: float
    metrics: Mapping[str, float]
    drafts: Mapping[str, str]


@dataclass(frozen=True)
class _Counter:
    """A counter in a line, such as ``[3/79]``. `name` is the text before it."""

    name: str
    number: int
    total: int
    text: str


def _find_counter(text: str) -> _Counter | None:
    """Return the counter in the text before a loss, unless it counts epochs."""
    match = _COUNTER.search(text)
    if match is None or _EPOCH_NAME.search(text[: match.start()]):
        return None
    return _Counter(text[: match.start()], int(match[1]), int(match[2]), text[: match.end()])


class ReportReader:
    """Reads the reports of one evaluation on one rank, from a file or from printed lines.

    The source of the first report, file or lines, is the only source of reports. Both may have
    notes about drafts.

    Attributes:
        path: Path of the file, which has no name on disk.
        last_lines: The last lines that were printed.
        has_unread: Whether a report in the file was ignored.
        has_read_checkpoint: Whether the program has read its checkpoint.
        unparsed: The latest match of the loss pattern that is not a number, and its line; or empty.
        has_cut_line: Whether a line was too long to be searched.
        epochs: The number of epochs according to the program's arguments; None if not known.
    """

    def __init__(self, script: Script) -> None:
        self._loss = re.compile(script.pattern) if script.pattern is not None else None
        self._is_maximized = script.maximize is not None
        self._step = re.compile(script.step) if script.step is not None else None
        self._metrics = {name: re.compile(pattern) for name, pattern in script.metrics.items()}
        self._file = os.memfd_create("hpo-metrics")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._offset = 0
        self._partial_line = b""
        self._uses_lines: bool | None = None
        self.has_unread = False
        self._found_metrics: dict[str, float] = {}
        self._drafts: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by stream
        self._last_stream = "file"  # source of the last loss
        self.has_read_checkpoint = False
        self._has_saved = False
        self._new_reports: list[Report] = []
        self.last_lines: list[str] = []
        self.unparsed = ""
        self.has_cut_line = False
        self.epochs: int | None = None
        self._score = ""  # The first loss that seems to be a score, of which more is better.
        self._epoch = ""  # The latest match of --step.
        self._pending: _PrintedLoss | None = None  # With --step, the latest loss of the epoch.
        self._counter: _Counter | None = None  # In the line of the latest loss.
        self._parts = ""  # Two lines with a loss that seem to belong to one epoch.

    def find_warning(self, number: int, saves: bool) -> str:
        """Return a warning about the `number` reports, and about the checkpoints if `saves`."""
        if self._has_saved and saves:
            if not number:
                return (
                    "rank 0 saves checkpoints, and reports no losses: report each loss on rank 0, "
                    "after its checkpoint"
                )
            if not self.has_read_checkpoint:
                return (
                    "it saves checkpoints, and never reads hpo.checkpoint: it would restart "
                    "instead of continuing"
                )
            if self._drafts[self._last_stream].get("checkpoint"):
                return (
                    "its last checkpoint belongs to no loss: call hpo.save_checkpoint before the "
                    "report of its loss, not after"
                )
        if self.has_unread:
            return (
                "hpo.report is ignored, since a line has matched --loss before. Use only one of "
                "them in all evaluations"
            )
        if self._score:
            return (
                f"--loss has matched {self._score!r}, and the lowest is the best. If more is "
                "better, give --maximize instead"
            )
        if self._parts and self._step is None:
            return f"--loss has matched {self._parts}. If this is one epoch, {_ADVICE_ON_STEP}"
        if self.epochs is not None and number > self.epochs + 1 and self._step is None:
            return (
                f"it has reported more than {self.epochs + 1} losses, and its arguments name "
                f"{self.epochs} epochs. If several belong to one epoch, {_ADVICE_ON_STEP}"
            )
        if self.has_cut_line and self._uses_lines:
            return _CUT_LINE
        return ""

    def take_note(self, name: str, value: str, stream: str) -> None:
        """Record a note. A note about a draft belongs to the next loss of the stream."""
        if name == "asked":
            self.has_read_checkpoint = True
        elif name in _NOTE_NAMES and _DRAFT_NAME.fullmatch(value):
            self._drafts[stream][name] = value
            self._has_saved |= name == "checkpoint"

    def take_line(self, line: str | None, stream: str = "stdout") -> None:
        """Search a line for a loss and metrics. A loss gets all metrics since the previous loss.

        Parts of a line that is too long are given as None, since a number may be cut.
        """
        if line is None:
            self.has_cut_line = True
            return
        self.last_lines = [*self.last_lines, line][-_MAX_LAST_LINES:]
        self._read_file()
        try:
            with _limit_time():
                self._find_values(line, stream)
        except TimeoutError:
            self._add_mistake(
                f"the search for --loss or --metric took more than {_SECONDS_FOR_A_LINE:g} s in "
                f"{line[:60]!r}. Use a simpler pattern"
            )

    def _find_values(self, text: str, stream: str) -> None:
        step = self._step.search(text) if self._step is not None else None
        if step is not None and step[1] not in (None, self._epoch):
            self._report_pending()
            self._epoch = step[1]
        for name, pattern in self._metrics.items():
            if match := pattern.search(text):
                with suppress(ValueError, AttributeError):
                    self._found_metrics[name] = _parse_number(match[1])
        if self._loss is None or self._uses_lines is False:
            return
        match = self._loss.search(text)
        if match is None:
            return
        try:
            loss = _parse_number(match[1])
        except (ValueError, AttributeError):  # The line may be the heading of a table.
            self.unparsed = f"{match[1]!r} in {text[:100]!r}"
            return
        self._uses_lines = True
        if self._is_maximized:
            self._found_metrics[SCORE] = loss
            loss = -loss
        elif not self._score and (found := _SCORE_NAME.search(text[: match.start(1)])):
            self._score = f"{found[0]}{match[1]}"
        self._compare_counters(text[: match.start(1)])
        self._take_loss(_PrintedLoss(loss, self._found_metrics, self._take_drafts(stream)))
        self._found_metrics = {}

    def _compare_counters(self, text: str) -> None:
        """Notice a counter of batches, before a loss, that is higher than in the previous line."""
        before = self._counter
        self._counter = now = _find_counter(text)
        if before is None or now is None or self._parts:
            return
        if (now.name, now.total) == (before.name, before.total) and now.number > before.number:
            self._parts = f"{before.text!r} and {now.text!r}"

    def _take_loss(self, printed: _PrintedLoss) -> None:
        """Report a loss, or with ``--step`` the previous one if its epoch has ended."""
        if self._step is not None and self._pending is not None:
            earlier = self._pending
            metrics = {**earlier.metrics, **printed.metrics}
            drafts = {**earlier.drafts, **printed.drafts}
            printed = replace(printed, metrics=metrics, drafts=drafts)
        self._pending = printed
        if self._step is None:
            self._report_pending()

    def _report_pending(self) -> None:
        printed = self._pending
        self._pending = None
        if printed is not None:
            self._add_report(printed.loss, printed.metrics, printed.drafts)

    def take_new_reports(self) -> list[Report]:
        """Return the reports found since the previous call."""
        self._read_file()
        new = self._new_reports
        self._new_reports = []
        return new

    def take_last_reports(self, is_whole: bool = True) -> list[Report]:
        """Return the last reports of a program that has ended; its last line may be incomplete.

        With ``--step``, the last epoch counts only if the program was not cut off in it.
        """
        self._read_file()
        if self._partial_line.strip():
            self._take_file_line(self._partial_line)
        self._partial_line = b""
        if is_whole:
            self._report_pending()
        return self.take_new_reports()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read_file(self) -> None:
        size = os.fstat(self._file).st_size
        data = self._partial_line + os.pread(self._file, max(0, size - self._offset), self._offset)
        self._offset = max(size, self._offset)
        *lines, self._partial_line = data.split(b"\n")
        for line in lines:
            self._take_file_line(line)
        if size < self._offset:
            self._offset = size
            self._add_mistake("the file of HPO_METRICS must not be overwritten. Append to it")

    def _take_file_line(self, line: bytes) -> None:
        if not line.strip():
            return
        # A note from `hpo.evaluation_api` has a single item.
        with suppress(ValueError, AttributeError, RecursionError):
            ((name, value),) = json.loads(line).items()
            if name in _NOTE_NAMES:
                self.take_note(name, str(value), "file")
                return
        if self._uses_lines:
            self.has_unread = True
            return
        self._uses_lines = False
        try:
            content = json.loads(line)
            loss = _check_number(content.pop("loss"))
            metrics = {str(name): _check_number(value) for name, value in content.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            shown = line.decode(errors="replace")[:100]
            self._add_mistake(
                f"a report must be a JSON object with a loss and metrics, got {shown}"
            )
            return
        self._add_report(loss, metrics, self._take_drafts("file"))

    def _add_mistake(self, text: str) -> None:
        self._new_reports.append(Report(math.nan, mistake=text))

    def _take_drafts(self, stream: str) -> dict[str, str]:
        """Return the drafts that belong to a loss of a stream."""
        self._last_stream = stream
        return self._drafts.pop(stream, {})

    def _add_report(
        self, loss: float, metrics: Mapping[str, float], drafts: Mapping[str, str]
    ) -> None:
        mistake = "" if math.isfinite(loss) else f"the validation loss is {loss}"
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        report = Report(
            loss,
            finite,
            mistake,
            offers_weights="weights" in drafts,
            has_saved="checkpoint" in drafts,
            checkpoint=drafts.get("checkpoint", ""),
            weights=drafts.get("weights", ""),
        )
        self._new_reports.append(report)


def _parse_number(text: str) -> float:
    return float(text.rstrip(",;)"))


def _check_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


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
            "rank only"
        )
        return [Report(report.loss, mistake=mistake)]
