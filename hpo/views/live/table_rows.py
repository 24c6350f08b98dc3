"""Compute the rows of tables in `hpo watch`: evaluations, failures, rungs, islands and workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rich.text import Text

from hpo.objectives import Objectives
from hpo.results.display_names import collect_names, name_params
from hpo.results.failures import format_reason, group_failures
from hpo.store.evaluations import Evaluation
from hpo.text_format import (
    cut_text,
    format_clock,
    format_number,
    format_tenths,
    format_value,
    make_printable,
)
from hpo.views.live.run_status import TEXT_STYLES, RunStatus
from hpo.views.result_text import make_rung_columns, name_columns

_LONGEST_VALUE = 24  # characters
_LONGEST_NAME = 60
_LONGEST_REASON = 300
_RESERVED_COLUMNS = (
    *("trial", "state", "loss", "seconds", "epochs"),
    *("island", "worker", "ago", "failure"),
)
_WORKER_COLUMNS = ("worker", "evaluated", "failed", "trial", "epochs", "loss", "for")


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
