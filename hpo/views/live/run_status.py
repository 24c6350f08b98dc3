"""Compute the status of a run from a snapshot, and describe it in a few lines and in tables.

The status has the phase, progress and pace of the run, and the state of islands and workers.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual, compare_confirmed
from hpo.results.display_names import collect_names, merge_params_and_metrics, name_params
from hpo.results.failures import format_reason, group_failures
from hpo.results.run_snapshot import EXHAUSTED_REASON, RunSnapshot
from hpo.results.summary import RungSummary, list_best_so_far, parse_session_start, summarize_rungs
from hpo.store.evaluations import Evaluation, find_best, group_by_individual
from hpo.store.pareto_front import find_front
from hpo.store.pruning import is_search_over
from hpo.text_format import (
    cut_text,
    format_clock,
    format_duration,
    format_named_values,
    format_number,
    format_tenths,
    format_value,
    make_printable,
    make_show_command,
)
from hpo.views.loss_scale import find_complete_losses
from hpo.views.result_text import make_rung_columns, name_columns
from hpo.views.tables import MAX_HYPERPARAMETERS
from hpo.views.times import Pace, WorkingTime, compute_pace

ACTIVE_PHASES = ("searching", "confirming", "ending", "unknown")
TEXT_STYLES = {"failed": "red", "pruned": "yellow", "paused": "yellow"}
_PHASE_TITLES = {
    "searching": ("searching", "bold"),
    "confirming": ("confirming the best", "bold"),
    "ending": ("ending", "bold"),
    "finished": ("finished", "bold green"),
    "stopped": ("stopped", "bold yellow"),
    "crashed": ("crashed", "bold red"),
    "unknown": ("running or not?", "bold yellow"),
}
_MAX_LINE_LENGTH = 500  # characters
_LONGEST_VALUE = 24
_LONGEST_NAME = 60
_LONGEST_REASON = 300
_RESERVED_COLUMNS = (
    *("trial", "state", "loss", "seconds", "epochs"),
    *("island", "worker", "ago", "failure"),
)
_WORKER_COLUMNS = ("worker", "evaluated", "failed", "trial", "epochs", "loss", "for")
_STATES = (
    *("complete", "pruned", "paused", "failed", "running", "waiting"),
    *("imported", "promoted", "interrupted"),
)
_STATE_NAMES = {"promoted": "promoted and continued", "interrupted": "interrupted and retried"}


@dataclass(frozen=True)
class IslandStatus:
    """Status of one island."""

    index: int
    """Number of the island, from 0."""
    population: int
    """Number of its evaluations that are finished (complete, pruned, paused or failed)."""
    best: Evaluation | None
    """Its evaluation with the lowest loss; None if no evaluation has succeeded."""
    failed: int


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at the time of a snapshot."""

    snapshot: RunSnapshot
    at: float
    """Time in seconds since the epoch, to which the ages of evaluations refer."""
    phase: str
    """Searching, confirming, ending, finished, stopped, crashed or unknown.

    A run is ending if all evaluations are done, but it is still active. It has stopped if it ended
    early without a crash. The phase is unknown if this host cannot see whether the run is active.
    """
    reason: str
    """More about the phase, such as why the run stopped; may be empty."""
    done: int
    """Number of individuals that have ended, in the confirmation if that is the phase."""
    total: int
    """Number of individuals to evaluate in the search, or in the confirmation."""
    pace: Pace
    counts: dict[str, int]
    """Number of evaluations by state. Imported evaluations count as "imported"."""
    best: Evaluation | None
    """The first individual of the front, or the evaluation with the lowest loss."""
    front: list[Evaluation]
    islands: list[IslandStatus]
    running: list[Evaluation]
    """The running evaluation of each worker, the oldest first."""
    idle_workers: list[int]
    """Workers that have evaluated in this session, but now run no evaluation."""
    rungs: list[RungSummary]
    improvements: list[tuple[float, float]]
    """For each new best: the working time when it was found, 0 if imported, and its loss."""
    working_seconds: float
    """Time until now in which at least one worker evaluated, in seconds."""
    losses: list[float]
    to_confirm: bool
    """Whether the best will be confirmed with other seeds after the search."""
    confirmed: list[ConfirmedIndividual]
    """Comparison of the confirmed individuals, best first."""

    @property
    def may_be_running(self) -> bool:
        """Whether the run is active, or may be active as far as this host can see."""
        return self.phase in ACTIVE_PHASES


def compute_run_status(snapshot: RunSnapshot) -> RunStatus:
    """Return the status of a run at the time of a snapshot."""
    evaluations = snapshot.evaluations
    confirmations = snapshot.confirmations
    everything = [*evaluations, *confirmations]
    phase, reason = _find_phase(snapshot)
    shown = confirmations if phase == "confirming" else evaluations
    total = len(confirmations) if phase == "confirming" else snapshot.manifest.budget
    done = sum(
        any(e.has_ended_in_run for e in group) for group in group_by_individual(shown).values()
    )
    may_be_running = phase in ACTIVE_PHASES
    running = _find_running(everything)
    since = parse_session_start(snapshot.manifest)
    seen = {e.worker for e in everything if may_be_running and e.started >= since}
    objectives = snapshot.manifest.objectives
    front = find_front(evaluations, objectives) if objectives.is_multi_objective else []
    now = snapshot.taken_at if may_be_running else None
    time = WorkingTime(everything, now)
    return RunStatus(
        snapshot,
        at=snapshot.taken_at,
        phase=phase,
        reason=reason,
        done=done,
        total=total,
        pace=compute_pace(shown, total - done, since, now),
        counts=dict(Counter("imported" if e.imported_from else e.state for e in evaluations)),
        best=front[0] if front else find_best(evaluations),
        front=front,
        islands=_summarize_islands(evaluations, snapshot.manifest.layout.islands),
        running=running,
        idle_workers=sorted(seen - {evaluation.worker for evaluation in running}),
        rungs=summarize_rungs(evaluations, snapshot.manifest.pruner, objectives),
        improvements=[
            (0.0 if e.imported_from else time.compute_seconds(e.ended), e.loss)
            for e in list_best_so_far(evaluations)
        ],
        working_seconds=time.total,
        losses=find_complete_losses(evaluations),
        to_confirm=phase == "searching" and snapshot.manifest.confirm_seeds > 0,
        confirmed=compare_confirmed(confirmations),
    )


def _find_phase(snapshot: RunSnapshot) -> tuple[str, str]:
    run = snapshot.manifest
    states = {evaluation.state for evaluation in snapshot.confirmations}
    is_confirming = "running" in states
    is_unconfirmed = is_confirming or "waiting" in states
    is_searching = any(evaluation.state == "running" for evaluation in snapshot.evaluations)
    is_over = is_search_over(snapshot.evaluations, run.budget, run.pruner, run.objectives)
    has_best = find_best(snapshot.evaluations) is not None
    will_confirm = run.confirm_seeds and not snapshot.confirmations and has_best
    is_over = is_over and not is_searching
    is_finished = is_over and not is_unconfirmed and not will_confirm
    if snapshot.is_in_use and is_finished:
        return "ending", ""
    if snapshot.is_in_use:
        return "confirming" if is_confirming or (is_unconfirmed and is_over) else "searching", ""
    if is_finished:
        return "finished", ""
    if snapshot.is_in_use is None:
        holder = snapshot.holder or "the run"
        return "unknown", f"{holder} may still be active; this host cannot see its lock"
    if snapshot.holder:
        return "crashed", snapshot.holder.split(" since ")[0]
    return "stopped", snapshot.stop_reason


def _summarize_islands(evaluations: Sequence[Evaluation], count: int) -> list[IslandStatus]:
    """Return the status of each island. Island `i` of a larger session counts for `i % count`."""
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.is_finished or evaluation.state == "running":
            groups.setdefault(evaluation.island % count, []).append(evaluation)
    return [
        IslandStatus(
            index,
            sum(evaluation.is_finished for evaluation in group),
            find_best(group),
            sum(evaluation.state == "failed" for evaluation in group),
        )
        for index, group in sorted(groups.items())
    ]


def _find_running(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the running evaluation of each worker, the latest if a crash has left several."""
    by_worker: dict[int, Evaluation] = {}
    running = [evaluation for evaluation in evaluations if evaluation.state == "running"]
    for evaluation in sorted(running, key=lambda evaluation: evaluation.started):
        by_worker[evaluation.worker] = evaluation
    return sorted(by_worker.values(), key=lambda e: (e.started, e.worker))


def format_header(run: RunStatus, path: Path) -> list[Text]:
    """Return the lines of the header. The first line has the phase and the progress of the run."""
    name, style = _PHASE_TITLES[run.phase]
    progress = f"  {format_progress(run)}  {make_printable(str(path))}"
    title = Text.assemble((name, style), progress)
    explanation = [Text(make_printable(line), style) for line in _explain(run, path)]
    return [title, *explanation, *_format_results(run, path)]


def _format_results(run: RunStatus, path: Path) -> Iterator[Text]:
    names = dict(_STATE_NAMES)
    states = list(_STATES)
    if not run.may_be_running:
        names["running"] = "not ended"
        states.append(states.pop(states.index("running")))
    texts = [
        Text(f"{run.counts[state]} {names.get(state, state)}", TEXT_STYLES.get(state, ""))
        for state in states
        if run.counts.get(state)
    ]
    yield Text(", ").join(texts) if texts else Text("no evaluation has begun")
    if run.best is None:
        yield Text("no evaluation is complete")
        return
    yield _describe_best(run, run.best)
    params = run.best.params
    metrics = run.best.metrics
    if len(params) > MAX_HYPERPARAMETERS:
        yield Text(cut_text(format_named_values(metrics), _MAX_LINE_LENGTH))
        command = make_show_command(path, run.best.label)
        yield Text(f"{command} shows all {len(params)} hyperparameters", "dim")
    else:
        values = merge_params_and_metrics(params, metrics, ("loss", "trial"))
        yield Text(cut_text(format_named_values(values), _MAX_LINE_LENGTH))
    if run.front:
        objectives = run.snapshot.manifest.objectives
        yield Text(make_printable(_format_ranges(run.front, objectives)))
    first = next(iter(run.confirmed), None)
    if first is not None and first.mean is not None:
        mean = format_number(first.mean)
        seeds = len(first.losses)
        yield Text(
            f"confirmed: trial {first.trial} is first, mean loss {mean} of {seeds} other seeds"
        )


def _format_ranges(front: Sequence[Evaluation], objectives: Objectives) -> str:
    texts = []
    values = zip(*(evaluation.values for evaluation in front), strict=True)
    for name, own in zip(objectives.names, values, strict=False):
        lowest = format_number(min(own))
        highest = format_number(max(own))
        texts.append(f"{name} {lowest} to {highest}" if lowest != highest else f"{name} {lowest}")
    return ", ".join(texts)


def _describe_best(run: RunStatus, best: Evaluation) -> Text:
    age = format_clock(run.at - best.ended)
    found = f"found {age} ago on island {best.island} by worker {best.worker}"
    if best.imported_from:
        found = cut_text(make_printable(f"imported from {best.imported_from}"), _MAX_LINE_LENGTH)
    name = f"front {len(run.front)}  lowest loss" if run.front else "best"
    text = f"{name} {format_number(best.loss)}"
    return Text.assemble((text, "bold green"), f"  trial {best.trial}, {found}")


def format_progress(run: RunStatus) -> str:
    """Return the number of ended evaluations, and if known the pace and the remaining time."""
    unit = "confirmations" if run.phase == "confirming" else "evaluations"
    text = f"{run.done}/{run.total} {unit}"
    if run.pace.per_minute is not None:
        digits = ".0f" if run.pace.per_minute >= 10 else ".2g"
        text += f", {run.pace.per_minute:{digits}} a minute"
    seconds = run.pace.seconds_left
    if seconds is not None and run.done < run.total:
        left = format_duration(seconds) if seconds >= 60 else f"{seconds:.0f} s"
        text += f", about {left} left{', then --confirm-seeds' if run.to_confirm else ''}"
    return text


def _explain(run: RunStatus, path: Path) -> list[str]:
    """Return lines that explain the phase, such as how to resume a run that has stopped."""
    resume = f"To resume: the same command with --run-dir {shlex.quote(str(path))} --resume"
    if run.phase == "stopped" and run.reason != EXHAUSTED_REASON:
        remedy = f" and {run.snapshot.remedy}" if run.snapshot.remedy else ""
        return [f"{run.reason or 'the run is not active'}. {resume}{remedy}"]
    if run.phase == "crashed":
        return [f"the run is not active: {run.reason} has crashed. {resume}"]
    return [run.reason] if run.reason else []


class TableRows(NamedTuple):
    """Rows of a table."""

    headings: Sequence[str]
    """Headings of the columns."""
    keys: Sequence[str]
    """For each row, the label of the evaluation that it opens; "" if it opens none."""
    cells: Callable[[int], Sequence[str | Text]]
    """Function that takes the index of a row and returns its cells."""


class Column(NamedTuple):
    """A column of a table of evaluations."""

    heading: str
    find_value: Callable[[Evaluation], Any]
    """Function that returns the value by which an evaluation is sorted; None without a value."""
    format_value: Callable[[Evaluation], str | Text]
    """Function that returns the text of an evaluation's cell."""


@dataclass
class RowOrder:
    """Order and filter of a table of evaluations."""

    heading: str = "trial"
    reverse: bool = True
    filter_words: str = ""
    """Words separated by spaces; only evaluations that match all of them are shown."""

    def sort_by(self, heading: str) -> None:
        """Sort by a column, or reverse the order if the table is already sorted by it."""
        self.heading, self.reverse = heading, heading == self.heading and not self.reverse

    def make_rows(self, evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> TableRows:
        """Return the rows that match the filter, sorted by a column, whose heading gets an arrow.

        Evaluations without a value in this column come last.
        """
        words = self.filter_words.lower().split()
        same = [column for column in columns if column.heading == self.heading]
        sort_column = (same or columns)[0]
        ranked = []
        last = []
        for evaluation in evaluations:
            if all(_matches_word(evaluation, word) for word in words):
                value = sort_column.find_value(evaluation)
                if value is None:
                    last.append(evaluation)
                else:
                    ranked.append((value, evaluation))
        ranked.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=self.reverse)
        shown = [*(evaluation for _, evaluation in ranked), *last]
        arrow = "\u25bc" if self.reverse else "\u25b2"
        return TableRows(
            [f"{column.heading}{arrow if column is sort_column else ' '}" for column in columns],
            [evaluation.label for evaluation in shown],
            lambda row: [column.format_value(shown[row]) for column in columns],
        )


def _matches_word(evaluation: Evaluation, word: str) -> bool:
    """Return whether a word is the trial number, or occurs in another fact about an evaluation."""
    if word.isdigit():
        return word == str(evaluation.trial)
    params = [f"{name}={item}" for name, item in evaluation.params.items()]
    facts = [evaluation.label, evaluation.state, *params, evaluation.failure or ""]
    return word in " ".join(facts).lower()


def make_columns(
    evaluations: Sequence[Evaluation], objectives: Objectives, now: float
) -> list[Column]:
    """Return the columns of a table of `evaluations`; `now` is in seconds since the epoch."""
    names = collect_names(evaluation.params for evaluation in evaluations)
    metrics, params = name_columns(evaluations, names, objectives, _RESERVED_COLUMNS)
    columns = [
        Column("trial", lambda e: (e.confirms is not None, e.trial), lambda e: e.label),
        Column("state", lambda e: e.state, lambda e: Text(e.state, TEXT_STYLES.get(e.state, ""))),
        _make_column("loss", lambda e: e.loss),
        *(_make_column(shown, partial(_find_metric, name)) for name, shown in metrics.items()),
        *(
            Column(_format_name(shown), partial(_find_param, name), partial(_format_param, name))
            for name, shown in params.items()
        ),
        _make_column("seconds", lambda e: e.seconds if e.has_ended else math.nan, format_tenths),
        _make_column("epochs", lambda e: max(e.curve, default=0)),
        _make_column("island", lambda e: e.island),
        _make_column("worker", lambda e: e.worker),
        _make_column("ago", lambda e: now - e.ended, format_clock),
    ]
    if any(evaluation.state == "failed" for evaluation in evaluations):
        columns.append(
            Column(
                "failure",
                lambda e: format_reason(e) or None,
                lambda e: _format_reason(format_reason(e)),
            )
        )
    return columns


def _make_column(
    heading: str, value: Callable[[Evaluation], float], text: Callable[[float], str] = format_number
) -> Column:
    """Return a column of numbers. The cell of a number that is not finite is empty."""

    def find_finite(evaluation: Evaluation) -> float | None:
        found = value(evaluation)
        return found if math.isfinite(found) else None

    return Column(
        _format_name(heading),
        find_finite,
        lambda evaluation: "" if find_finite(evaluation) is None else text(value(evaluation)),
    )


def _format_name(name: str) -> str:
    return cut_text(make_printable(name), _LONGEST_NAME)


def _format_reason(reason: str) -> str:
    return cut_text(make_printable(reason), _LONGEST_REASON)


def _find_metric(name: str, evaluation: Evaluation) -> float:
    return evaluation.metrics.get(name, math.nan)


def _find_param(name: str, evaluation: Evaluation) -> Any:
    return evaluation.params.get(name)


def _format_param(name: str, evaluation: Evaluation) -> str:
    return cut_text(format_value(evaluation.params.get(name, "")), _LONGEST_VALUE)


def make_failure_rows(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return a row for each reason of failures, with their count and the latest evaluation."""
    kinds = group_failures(evaluations)
    labels = [kind.latest.label for kind in kinds]
    counts = [str(len(kind.failed)) for kind in kinds]
    texts = [_format_reason(kind.reason) for kind in kinds]
    return _make_table_rows({"count": counts, "latest": labels, "reason": texts}, labels)


def make_rung_rows(run: RunStatus) -> TableRows:
    """Return a row for each rung, with the trial that is promoted next."""
    labels = [str(rung.next.trial) if rung.next else "" for rung in run.rungs]
    return _make_table_rows(dict(make_rung_columns(run.rungs)), labels)


def make_island_rows(run: RunStatus) -> TableRows:
    """Return a row for each island, with its best evaluation."""
    best = [island.best for island in run.islands]
    labels = [evaluation.label if evaluation else "" for evaluation in best]
    columns = {
        "island": [str(island.index) for island in run.islands],
        "population": [str(island.population) for island in run.islands],
        "failed": [str(island.failed) for island in run.islands],
        "best": [format_number(evaluation.loss) if evaluation else "" for evaluation in best],
        "trial": labels,
    }
    return _make_table_rows(columns, labels)


def make_worker_rows(run: RunStatus, evaluations: Sequence[Evaluation] = ()) -> TableRows:
    """Return a row for each worker: its running evaluation, and the counts of its `evaluations`."""
    ended = Counter(e.worker for e in evaluations if e.has_ended_in_run)
    failed = Counter(e.worker for e in evaluations if e.state == "failed")
    running = {evaluation.worker: evaluation for evaluation in run.running}
    workers = sorted({*ended, *running, *run.idle_workers})
    now = [running.get(worker) for worker in workers]
    labels = [evaluation.label if evaluation else "" for evaluation in now]
    idle = "idle" if run.may_be_running else ""
    columns = {"worker": list(map(str, workers))}
    if ended:
        columns["evaluated"] = [str(ended[worker]) for worker in workers]
        columns["failed"] = [str(failed[worker]) for worker in workers]
    columns["trial"] = [label or idle for label in labels]

    def add_column(heading: str, format_cell: Callable[[Evaluation], str]) -> None:
        columns[heading] = [format_cell(evaluation) if evaluation else "" for evaluation in now]

    add_column("epochs", lambda e: str(len(e.curve)))
    add_column("loss", lambda e: format_number(min(e.curve.values())) if e.curve else "")
    add_column("for", lambda e: format_clock(run.at - e.started) if run.may_be_running else "")
    params = name_params(collect_names(e.params for e in run.running), _WORKER_COLUMNS)
    for name, shown in params.items():
        add_column(shown, partial(_format_param, name))
    return _make_table_rows(columns, labels)


def _make_table_rows(columns: Mapping[str, Sequence[str]], labels: Sequence[str]) -> TableRows:
    return TableRows(
        [_format_name(name) for name in columns],
        labels,
        list(zip(*columns.values(), strict=True)).__getitem__,
    )
