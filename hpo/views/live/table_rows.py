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
from hpo.results.display_names import collect_names, name_metrics, name_params
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
from hpo.views.front_text import put_objectives_first
from hpo.views.live.run_header import TEXT_STYLES
from hpo.views.live.run_status import RunStatus
from hpo.views.summary_text import make_rung_columns

_LONGEST_VALUE = 24  # characters
_LONGEST_NAME = 60
_LONGEST_REASON = 300
_RESERVED_COLUMNS = (
    "trial",
    "state",
    "loss",
    "seconds",
    "epochs",
    "island",
    "worker",
    "ago",
    "failure",
)
_WORKER_COLUMNS = ("worker", "evaluated", "failed", "trial", "epochs", "loss", "for")


class TableRows(NamedTuple):
    """Rows of a table.

    Attributes:
        headings: Headings of the columns.
        keys: For each row, the label of the evaluation that the user opens with it; "" if the row
            opens none.
        cells: Function that takes the index of a row and returns its cells.
    """

    headings: Sequence[str]
    keys: Sequence[str]
    cells: Callable[[int], Sequence[str | Text]]


class Column(NamedTuple):
    """A column of a table of evaluations.

    Attributes:
        heading: Heading of the column.
        find_value: Function that returns the value by which an evaluation is sorted; None if it has
            no value.
        format_value: Function that returns the text of an evaluation's cell.
    """

    heading: str
    find_value: Callable[[Evaluation], Any]
    format_value: Callable[[Evaluation], str | Text]


@dataclass
class RowOrder:
    """Order and filter of a table of evaluations.

    Attributes:
        heading: Heading of the column to sort by.
        reverse: Whether to sort in descending order.
        filter_words: Words separated by spaces; only evaluations that match all of them are shown.
    """

    heading: str = "trial"
    reverse: bool = True
    filter_words: str = ""

    def sort_by(self, heading: str) -> None:
        """Sort by a column, or reverse the order if the table is already sorted by it."""
        self.heading, self.reverse = heading, heading == self.heading and not self.reverse

    def make_rows(self, evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> TableRows:
        """Return the rows that match the filter, sorted by the column `heading`, which gets an arrow.

        Evaluations without a value in this column come last.
        """
        words = self.filter_words.lower().split()
        sort_column = next(
            (column for column in columns if column.heading == self.heading), columns[0]
        )
        chosen = [
            (sort_column.find_value(evaluation), evaluation)
            for evaluation in evaluations
            if all(_matches_word(evaluation, word) for word in words)
        ]
        ranked = [pair for pair in chosen if pair[0] is not None]
        ranked.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=self.reverse)
        shown = [
            evaluation for _, evaluation in [*ranked, *(pair for pair in chosen if pair[0] is None)]
        ]
        arrow = "\u25bc" if self.reverse else "\u25b2"
        headings = [
            f"{column.heading}{arrow if column is sort_column else ' '}" for column in columns
        ]
        return TableRows(
            headings,
            [evaluation.label for evaluation in shown],
            lambda row: [column.format_value(shown[row]) for column in columns],
        )


def _matches_word(evaluation: Evaluation, word: str) -> bool:
    """Return whether a word is the trial number, or occurs in the label, state, hyperparameters or failure."""
    if word.isdigit():
        return word == str(evaluation.trial)
    params = " ".join(f"{name}={item}" for name, item in evaluation.params.items())
    return (
        word in f"{evaluation.label} {evaluation.state} {params} {evaluation.failure or ''}".lower()
    )


def make_columns(
    evaluations: Sequence[Evaluation], objectives: Objectives, now: float
) -> list[Column]:
    """Return the columns of a table of `evaluations`; `now` is the current time, in seconds since the epoch."""
    params = name_params(
        collect_names(evaluation.params for evaluation in evaluations), _RESERVED_COLUMNS
    )
    found = put_objectives_first(
        sorted({name for evaluation in evaluations for name in evaluation.metrics}), objectives
    )
    metrics = name_metrics(found, params, _RESERVED_COLUMNS)
    columns = [
        Column(
            "trial",
            lambda evaluation: (evaluation.confirms is not None, evaluation.trial),
            lambda evaluation: evaluation.label,
        ),
        Column(
            "state",
            lambda evaluation: evaluation.state,
            lambda evaluation: Text(evaluation.state, TEXT_STYLES.get(evaluation.state, "")),
        ),
        _make_column("loss", lambda evaluation: evaluation.loss),
        *(_make_column(shown, partial(_find_metric, name)) for name, shown in metrics.items()),
        *(
            Column(_format_name(shown), partial(_find_param, name), partial(_format_param, name))
            for name, shown in params.items()
        ),
        _make_column(
            "seconds",
            lambda evaluation: evaluation.seconds if evaluation.has_ended else math.nan,
            format_tenths,
        ),
        _make_column("epochs", lambda evaluation: max(evaluation.curve, default=0)),
        _make_column("island", lambda evaluation: evaluation.island),
        _make_column("worker", lambda evaluation: evaluation.worker),
        _make_column("ago", lambda evaluation: now - evaluation.ended, format_clock),
    ]
    if any(evaluation.state == "failed" for evaluation in evaluations):
        columns.append(
            Column(
                "failure",
                lambda evaluation: format_reason(evaluation) or None,
                lambda evaluation: _format_reason(format_reason(evaluation)),
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


def _format_param(name: str, evaluation: Evaluation | None) -> str:
    return (
        cut_text(format_value(evaluation.params.get(name, "")), _LONGEST_VALUE)
        if evaluation
        else ""
    )


def make_failure_rows(evaluations: Sequence[Evaluation]) -> TableRows:
    """Return a row for each reason of failures, with the count and the latest of the failed evaluations."""
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
    labels = ["" if island.best is None else island.best.label for island in run.islands]
    columns = {
        "island": [str(island.index) for island in run.islands],
        "population": [str(island.population) for island in run.islands],
        "failed": [str(island.failed) for island in run.islands],
        "best": [
            "" if island.best is None else format_number(island.best.loss) for island in run.islands
        ],
        "trial": labels,
    }
    return _make_table_rows(columns, labels)


def make_worker_rows(run: RunStatus, evaluations: Sequence[Evaluation] = ()) -> TableRows:
    """Return a row for each worker: its running evaluation, and how many of its `evaluations` have ended or failed."""
    ended = Counter(evaluation.worker for evaluation in evaluations if evaluation.has_ended_in_run)
    failed = Counter(
        evaluation.worker for evaluation in evaluations if evaluation.state == "failed"
    )
    own = {evaluation.worker: evaluation for evaluation in run.running}
    workers = sorted({*ended, *own, *run.idle_workers})
    now = [own.get(worker) for worker in workers]
    labels = [evaluation.label if evaluation else "" for evaluation in now]
    idle = "idle" if run.may_be_running else ""
    columns = {
        "worker": [str(worker) for worker in workers],
        **({"evaluated": [str(ended[worker]) for worker in workers]} if ended else {}),
        **({"failed": [str(failed[worker]) for worker in workers]} if ended else {}),
        "trial": [text or idle for text in labels],
        "epochs": [str(len(evaluation.curve)) if evaluation else "" for evaluation in now],
        "loss": [
            format_number(min(evaluation.curve.values())) if evaluation and evaluation.curve else ""
            for evaluation in now
        ],
        "for": [
            format_clock(run.at - evaluation.started) if evaluation and run.may_be_running else ""
            for evaluation in now
        ],
    }
    params = name_params(
        collect_names(evaluation.params for evaluation in run.running), _WORKER_COLUMNS
    )
    return _make_table_rows(
        {
            **columns,
            **{
                shown: [_format_param(name, evaluation) for evaluation in now]
                for name, shown in params.items()
            },
        },
        labels,
    )


def _make_table_rows(columns: Mapping[str, Sequence[str]], labels: Sequence[str]) -> TableRows:
    return TableRows(
        [_format_name(name) for name in columns],
        labels,
        list(zip(*columns.values(), strict=True)).__getitem__,
    )
