"""Read the reports of a training program, from lines that it prints or from a file.

Losses that are probably not what a user means, such as scores, and running means of an epoch, are
noticed in the lines.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hpo.process.messages import Report
from hpo.script_objective import SCORE, Script
from hpo.text_format import cut_text, format_list

# The end of the text before a number that is usually maximised, such as "Acc@1 ".
_SCORE_NAME = re.compile(
    r"(?<![^\W_])(?:acc(?:uracy)?|f1|[a-z_]*(?:auc|bleu|score)|r2|mIoU|mAP)(?:@\d+)?(?![a-z])"
    r"(?:(?!loss|err)\D)*$",
    re.IGNORECASE,
)
# A counter of batches, such as [3/79], but not of epochs.
_COUNTER = re.compile(r"(?<![\w./])(\d+) ?/ ?(\d+)(?![\w./])[\])]?")
_EPOCH_NAME = re.compile(r"\bep(?:och)?s?\W*$", re.IGNORECASE)
_EPOCH = re.compile(r"\bep(?:och)?\W*(\d+)", re.IGNORECASE)
_ADVICE_ON_STEP = "give --step, a regular expression of the epoch, so that its last loss counts"
_MAX_LAST_LINES = 20
_MAX_SHOWN_CHARACTERS = 60
_SECONDS_FOR_A_LINE = 1.0
_NOTE_NAMES = ("checkpoint", "weights", "asked")
_DRAFT_NAME = re.compile(r"\d+-\d+")  # process and number


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
class _Place:
    """The epoch and the batch of a program that prints a loss, as the text before it shows."""

    shown: str
    """The end of the text, with the loss."""
    epoch: str = ""
    """The number of the epoch; empty if the text has none."""
    name: str = ""
    """The text before a counter of batches, such as ``[3/79]``."""
    number: int = 0
    total: int = 0
    """What the counter counts to; 0 without a counter."""

    def follows_in_epoch(self, before: _Place) -> bool:
        """Return whether both places seem to be in one epoch: it is named, or a counter rises."""
        if self.epoch and self.epoch == before.epoch:
            return True
        is_same = (self.name, self.total) == (before.name, before.total)
        return is_same and self.number > before.number


def _find_place(text: str, loss: str) -> _Place:
    """Return the place that the text before a loss shows."""
    shown = f"{text}{loss}"[-_MAX_SHOWN_CHARACTERS:]
    epoch = _EPOCH.search(text)
    counter = _COUNTER.search(text)
    if counter is None or _EPOCH_NAME.search(text[: counter.start()]):
        return _Place(shown, epoch[1] if epoch else "")
    name = text[: counter.start()]
    return _Place(shown, epoch[1] if epoch else "", name, int(counter[1]), int(counter[2]))


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
        cut_line: A warning about a line that was too long to be searched; or empty.
        epochs: The number of epochs according to the program's arguments; None if not known.
    """

    def __init__(self, script: Script) -> None:
        self._loss = re.compile(script.pattern) if script.pattern is not None else None
        self._option = f"--{script.pattern_name}"
        self._is_maximized = script.maximize is not None
        self._step = re.compile(script.step) if script.step is not None else None
        self._metrics = {name: re.compile(pattern) for name, pattern in script.metrics.items()}
        # The latest match of each metric of which no number was read yet.
        self._unread_metrics = dict.fromkeys(script.metrics, "")
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
        self.cut_line = ""
        self.epochs: int | None = None
        self._score = ""  # The first loss that seems to be a score, of which more is better.
        self._epoch = ""  # The latest match of --step.
        self._pending: _PrintedLoss | None = None  # With --step, the latest loss of the epoch.
        self._place: _Place | None = None  # That of the latest loss.
        self._parts: tuple[_Place, _Place] | None = None  # Two that seem to be in one epoch.

    def find_warning(self, number: int, is_whole: bool) -> str:
        """Return a warning about the `number` reports of a program.

        If `is_whole`, the program has ended by itself, and may also lack checkpoints and metrics.
        """
        if is_whole and (warning := self._find_checkpoint_warning(number)):
            return warning
        if self.has_unread:
            return (
                f"hpo.report is ignored, since a line has matched {self._option} before. Use only "
                "one of them in all evaluations"
            )
        if self._score:
            return (
                f"--loss has matched {self._score!r}, and the lowest is the best. If more is "
                "better, give --maximize instead"
            )
        if self._parts and self._step is None and self._parts[0].total != self.epochs:
            shown = " and ".join(repr(place.shown) for place in self._parts)
            return f"{self._option} has matched {shown}. If this is one epoch, {_ADVICE_ON_STEP}"
        if self._step is not None and number and not self._epoch:
            return "--step has matched no line, so only the last loss of the program counts"
        if self.epochs is not None and number > self.epochs + 1 and self._step is None:
            return (
                f"it has reported more than {self.epochs + 1} losses, and its arguments name "
                f"{self.epochs} epochs. If several belong to one epoch, {_ADVICE_ON_STEP}"
            )
        if self._uses_lines and self._unread_metrics and is_whole:
            matches = [f"{text!r} by {name}" for name, text in self._unread_metrics.items() if text]
            matched = f"; it has matched {format_list(matches)}" if matches else ""
            return (
                f"--metric {format_list(self._unread_metrics)} has read no number from what the "
                f"program printed{matched}"
            )
        return self.cut_line if self._uses_lines else ""

    def _find_checkpoint_warning(self, number: int) -> str:
        """Return a warning about the checkpoints that a program has saved."""
        if not self._has_saved:
            return ""
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
            self.cut_line = (
                f"a line of more than 64 KiB was not searched for {self._option}: print the loss "
                "on its own line"
            )
            return
        self.last_lines = [*self.last_lines, line][-_MAX_LAST_LINES:]
        self._read_file()
        try:
            with _limit_time():
                self._find_values(line, stream)
        except TimeoutError:
            self._add_mistake(
                f"the search for {self._option} or --metric took more than "
                f"{_SECONDS_FOR_A_LINE:g} s in {line[:60]!r}. Use a simpler pattern"
            )

    def _find_values(self, text: str, stream: str) -> None:
        step = self._step.search(text) if self._step is not None else None
        if step is not None and step[1] not in (None, self._epoch):
            self._report_pending()
            self._epoch = step[1]
        for name, pattern in self._metrics.items():
            if match := pattern.search(text):
                self._read_metric(name, match)
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
        self._compare_places(_find_place(text[: match.start(1)], match[1]))
        self._take_loss(_PrintedLoss(loss, self._found_metrics, self._take_drafts(stream)))
        self._found_metrics = {}

    def _read_metric(self, name: str, match: re.Match[str]) -> None:
        try:
            self._found_metrics[name] = _parse_number(match[1])
            self._unread_metrics.pop(name, None)
        except (ValueError, AttributeError):
            if name in self._unread_metrics:
                self._unread_metrics[name] = cut_text(match[0], _MAX_SHOWN_CHARACTERS)

    def _compare_places(self, now: _Place) -> None:
        """Notice if this loss and the previous one seem to belong to one epoch."""
        before = self._place
        self._place = now
        if self._parts is None and before is not None and now.follows_in_epoch(before):
            self._parts = before, now

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
            epoch=int(self._epoch) if self._epoch.isdecimal() else None,
        )
        self._new_reports.append(report)


def _parse_number(text: str) -> float:
    return float(text.rstrip(",;)"))


def _check_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)
