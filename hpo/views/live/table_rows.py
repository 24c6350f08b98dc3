"""What the tables of a run show: evaluations, sorted and filtered, failures, rungs, islands, workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rich.text import Text

from hpo.objectives import Objectives
from hpo.results.display_names import collect_names, name_metrics, name_params
from hpo.results.summary import format_reason, summarize_failures
from hpo.store.evaluations import Evaluation, format_label
from hpo.text_format import cut_text, format_clock, format_number, format_tenths, format_value, make_printable
from hpo.views.front_text import put_objectives_first
from hpo.views.live.run_header import TEXT_STYLES
from hpo.views.live.run_status import RunStatus
from hpo.views.rung_columns import make_rung_columns

_LONGEST_VALUE = 24  # characters of a hyperparameter's value
_LONGEST_NAME = 60
_LONGEST_REASON = 300
_RESERVED_COLUMNS = ("trial", "state", "loss", "seconds", "epochs", "island", "worker", "ago", "failure")
_WORKER_COLUMNS = ("worker", "evaluated", "failed", "trial", "epochs", "loss", "for")


class TableRows(NamedTuple):
    """Rows of a table: the headings of columns, the evaluation that each row opens, and the cells of a row."""

    headings: Sequence[str]
    keys: Sequence[str]
    cells: Callable[[int], Sequence[str | Text]]


class Column(NamedTuple):
    """A column of evaluations: its heading, what it is sorted by (None for nothing), and what it shows."""

    heading: str
    find_value: Callable[[Evaluation], Any]
    format_value: Callable[[Evaluation], str | Text]


@dataclass
class RowOrder:
    """Which evaluations are shown, those with all words, and the column by whose heading they are sorted."""

    heading: str = "trial"
    reverse: bool = True
    filter_words: str = ""

    def sort_by(self, heading: str) -> None:
        """Sort by a column, or the other way round if it is the one already."""
        self.heading, self.reverse = heading, heading == self.heading and not self.reverse

    def make_rows(self, evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> TableRows:
        """Return the rows of the evaluations; those without a value come last, and an arrow marks the column."""
        words = self.filter_words.lower().split()
        column = next((column for column in columns if column.heading == self.heading), columns[0])
        chosen = [
            (column.find_value(one), one) for one in evaluations if all(_matches_word(one, word) for word in words)
        ]
        ranked = [pair for pair in chosen if pair[0] is not None]
        ranked.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=self.reverse)
        shown = [one for _, one in [*ranked, *(pair for pair in chosen if pair[0] is None)]]
        arrow = "\u25bc" if self.reverse else "\u25b2"
        headings = [f"{one.heading}{arrow if one is column else ' '}" for one in columns]
        return TableRows(
            headings, [one.label for one in shown], lambda row: [column.format_value(shown[row]) for column in columns]
        )


def _matches_word(one: Evaluation, word: str) -> bool:
    """Tell whether a word is the number of a trial, or in its state, its hyperparameters or its failure."""
    if word.isdigit():
        return word == str(one.trial)
    params = " ".join(f"{name}={item}" for name, item in one.params.items())
    return word in f"{one.label} {one.state} {params} {one.failure or ''}".lower()


def make_columns(evaluations: Sequence[Evaluation], objectives: Objectives, now: float) -> list[Column]:
    """Return the columns for some evaluations; `now` is in seconds since the epoch."""
    params = name_params(collect_names(one.params for one in evaluations), _RESERVED_COLUMNS)
    found = put_objectives_first(sorted({name for one in evaluations for name in one.metrics}), objectives)
    metrics = name_metrics(found, params, _RESERVED_COLUMNS)
    columns = [
        Column("trial", lambda one: (one.confirms is not None, one.trial), lambda one: one.label),
        Column("state", lambda one: one.state, lambda one: Text(one.state, TEXT_STYLES.get(one.state, ""))),
        _make_column("loss", lambda one: one.loss),
        *(_make_column(shown, partial(_find_metric, name)) for name, shown in metrics.items()),
        *(
            Column(_format_name(shown), partial(_find_param, name), partial(_format_param, name))
            for name, shown in params.items()
        ),
        _make_column("seconds", lambda one: one.seconds if one.has_ended else math.nan, format_tenths),
        _make_column("epochs", lambda one: max(one.curve, default=0)),
        _make_column("island", lambda one: one.island),
        _make_column("worker", lambda one: one.worker),
        _make_column("ago", lambda one: now - one.ended, format_clock),
    ]
    if any(one.state == "failed" for one in evaluations):
        columns.append(
            Column("failure", lambda one: format_reason(one) or None, lambda one: _format_reason(format_reason(one)))
        )
    return columns


def _make_column(
    heading: str, value: Callable[[Evaluation], float], text: Callable[[float], str] = format_number
) -> Column:
    """Make a column of numbers; one that is not finite is left out."""

    def find_finite(one: Evaluation) -> float | None:
        found = value(one)
        return found if math.isfinite(found) else None

    return Column(_format_name(heading), find_finite, lambda one: "" if find_finite(one) is None else text(value(one)))


def _format_name(name: str) -> str:
    return cut_text(make_printable(name), _LONGEST_NAME)


def _format_reason(reason: str) -> str:
    return cut_text(make_printable(reason), _LONGEST_REASON)


def _find_metric(name: str, one: Evaluation) -> float:
    return one.metrics.get(name, math.nan)


def _find_param(name: str, one: Evaluation) -> Any:
    return one.params.get(name)


def _format_param(name: str, one: Evaluation | None) -> str:
    return cut_text(format_value(one.params.get(name, "")), _LONGEST_VALUE) if one else ""


def make_failure_rows(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return a row for each reason of failures, with the latest of them."""
    groups = summarize_failures(evaluations)
    labels = [format_label(group["trial"], group["confirms"] is not None) for group in groups]
    counts = [str(group["count"]) for group in groups]
    texts = [_format_reason(group["reason"]) for group in groups]
    return _make_table_rows({"count": counts, "latest": labels, "reason": texts}, labels)


def make_rung_rows(run: RunStatus) -> TableRows:
    """Return a row for each rung, with what goes on next."""
    labels = [str(rung["next"]["trial"]) if rung["next"] else "" for rung in run.rungs]
    return _make_table_rows(dict(make_rung_columns(run.rungs)), labels)


def make_island_rows(run: RunStatus) -> TableRows:
    """Return a row for each island, with its best."""
    labels = ["" if one.best is None else one.best.label for one in run.islands]
    columns = {
        "island": [str(one.index) for one in run.islands],
        "population": [str(one.population) for one in run.islands],
        "failed": [str(one.failed) for one in run.islands],
        "best": ["" if one.best is None else format_number(one.best.loss) for one in run.islands],
        "trial": labels,
    }
    return _make_table_rows(columns, labels)


def make_worker_rows(run: RunStatus, evaluations: Sequence[Evaluation] = ()) -> TableRows:
    """Return a row for each worker, with what it evaluates now, and what it has evaluated of some evaluations."""
    ended = Counter(one.worker for one in evaluations if one.has_ended_in_run)
    failed = Counter(one.worker for one in evaluations if one.state == "failed")
    own = {one.worker: one for one in run.running}
    workers = sorted({*ended, *own, *run.idle_workers})
    now = [own.get(worker) for worker in workers]
    labels = [one.label if one else "" for one in now]
    idle = "idle" if run.may_be_running else ""
    columns = {
        "worker": [str(worker) for worker in workers],
        **({"evaluated": [str(ended[worker]) for worker in workers]} if ended else {}),
        **({"failed": [str(failed[worker]) for worker in workers]} if ended else {}),
        "trial": [text or run.helper_texts.get(worker, idle) for worker, text in zip(workers, labels, strict=True)],
        "epochs": [str(len(one.curve)) if one else "" for one in now],
        "loss": [format_number(min(one.curve.values())) if one and one.curve else "" for one in now],
        "for": [format_clock(run.at - one.started) if one and run.may_be_running else "" for one in now],
    }
    params = name_params(collect_names(one.params for one in run.running), _WORKER_COLUMNS)
    return _make_table_rows(
        {**columns, **{shown: [_format_param(name, one) for one in now] for name, shown in params.items()}}, labels
    )


def _make_table_rows(columns: Mapping[str, Sequence[str]], labels: Sequence[str]) -> TableRows:
    return TableRows(
        [_format_name(name) for name in columns], labels, list(zip(*columns.values(), strict=True)).__getitem__
    )
