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
from hpo.results.names import all_names, metrics_shown, params_shown
from hpo.results.summary import reason_of, reasons
from hpo.store.evaluations import Evaluation, label
from hpo.text import clock, number, printable, short, tenths, value
from hpo.views.front import objectives_first
from hpo.views.live.head import STYLES
from hpo.views.live.standing import Standing
from hpo.views.rungs import rung_columns

_LONGEST = 24  # characters of a hyperparameter's value
_LONGEST_NAME = 60
_LONGEST_REASON = 300
_OWN = ("trial", "state", "loss", "seconds", "epochs", "island", "worker", "ago", "failure")
_OF_WORKERS = ("worker", "evaluated", "failed", "trial", "epochs", "loss", "for")


class Rows(NamedTuple):
    """Rows of a table: the headings of columns, the evaluation that each row opens, and the cells of a row."""

    headings: Sequence[str]
    keys: Sequence[str]
    cells: Callable[[int], Sequence[str | Text]]


class Column(NamedTuple):
    """A column of evaluations: its heading, what it is sorted by (None for nothing), and what it shows."""

    heading: str
    value: Callable[[Evaluation], Any]
    text: Callable[[Evaluation], str | Text]


@dataclass
class Choice:
    """Which evaluations are shown, those with all words, and the column by whose heading they are sorted."""

    heading: str = "trial"
    reverse: bool = True
    words: str = ""

    def sort_by(self, heading: str) -> None:
        """Sort by a column, or the other way round if it is the one already."""
        self.heading, self.reverse = heading, heading == self.heading and not self.reverse

    def rows(self, evaluations: Sequence[Evaluation], columns: Sequence[Column]) -> Rows:
        """Return the rows of the evaluations; those without a value come last, and an arrow marks the column."""
        words = self.words.lower().split()
        column = next((column for column in columns if column.heading == self.heading), columns[0])
        chosen = [(column.value(one), one) for one in evaluations if all(_has(one, word) for word in words)]
        ranked = [pair for pair in chosen if pair[0] is not None]
        ranked.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=self.reverse)
        shown = [one for _, one in [*ranked, *(pair for pair in chosen if pair[0] is None)]]
        arrow = "\u25bc" if self.reverse else "\u25b2"
        headings = [f"{one.heading}{arrow if one is column else ' '}" for one in columns]
        return Rows(headings, [one.label for one in shown], lambda row: [column.text(shown[row]) for column in columns])


def _has(one: Evaluation, word: str) -> bool:
    """Tell whether a word is the number of a trial, or in its state, its hyperparameters or its failure."""
    if word.isdigit():
        return word == str(one.trial)
    params = " ".join(f"{name}={item}" for name, item in one.params.items())
    return word in f"{one.label} {one.state} {params} {one.failure or ''}".lower()


def make_columns(evaluations: Sequence[Evaluation], objectives: Objectives, now: float) -> list[Column]:
    """Return the columns for some evaluations; `now` is in seconds since the epoch."""
    params = params_shown(all_names(one.params for one in evaluations), _OWN)
    found = objectives_first(sorted({name for one in evaluations for name in one.metrics}), objectives)
    metrics = metrics_shown(found, params, _OWN)
    columns = [
        Column("trial", lambda one: (one.confirms is not None, one.trial), lambda one: one.label),
        Column("state", lambda one: one.state, lambda one: Text(one.state, STYLES.get(one.state, ""))),
        _make_column("loss", lambda one: one.loss),
        *(_make_column(shown, partial(_metric, name)) for name, shown in metrics.items()),
        *(Column(_name(shown), partial(_param, name), partial(_value, name)) for name, shown in params.items()),
        _make_column("seconds", lambda one: one.seconds if one.has_ended else math.nan, tenths),
        _make_column("epochs", lambda one: max(one.curve, default=0)),
        _make_column("island", lambda one: one.island),
        _make_column("worker", lambda one: one.worker),
        _make_column("ago", lambda one: now - one.ended, clock),
    ]
    if any(one.state == "failed" for one in evaluations):
        columns.append(Column("failure", lambda one: reason_of(one) or None, lambda one: _reason(reason_of(one))))
    return columns


def _make_column(heading: str, value: Callable[[Evaluation], float], text: Callable[[float], str] = number) -> Column:
    """Make a column of numbers; one that is not finite is left out."""

    def finite(one: Evaluation) -> float | None:
        found = value(one)
        return found if math.isfinite(found) else None

    return Column(_name(heading), finite, lambda one: "" if finite(one) is None else text(value(one)))


def _name(name: str) -> str:
    return short(printable(name), _LONGEST_NAME)


def _reason(reason: str) -> str:
    return short(printable(reason), _LONGEST_REASON)


def _metric(name: str, one: Evaluation) -> float:
    return one.metrics.get(name, math.nan)


def _param(name: str, one: Evaluation) -> Any:
    return one.params.get(name)


def _value(name: str, one: Evaluation | None) -> str:
    return short(value(one.params.get(name, "")), _LONGEST) if one else ""


def failure_rows(evaluations: Sequence[Evaluation]) -> Rows:
    """Return a row for each reason of failures, with the latest of them."""
    groups = reasons(evaluations)
    labels = [label(group["trial"], group["confirms"] is not None) for group in groups]
    counts = [str(group["count"]) for group in groups]
    texts = [_reason(group["reason"]) for group in groups]
    return _rows({"count": counts, "latest": labels, "reason": texts}, labels)


def rung_rows(run: Standing) -> Rows:
    """Return a row for each rung, with what goes on next."""
    labels = [str(rung["next"]["trial"]) if rung["next"] else "" for rung in run.rungs]
    return _rows(dict(rung_columns(run.rungs)), labels)


def island_rows(run: Standing) -> Rows:
    """Return a row for each island, with its best."""
    labels = ["" if one.best is None else one.best.label for one in run.islands]
    columns = {
        "island": [str(one.index) for one in run.islands],
        "population": [str(one.population) for one in run.islands],
        "failed": [str(one.failed) for one in run.islands],
        "best": ["" if one.best is None else number(one.best.loss) for one in run.islands],
        "trial": labels,
    }
    return _rows(columns, labels)


def worker_rows(run: Standing, evaluations: Sequence[Evaluation] = ()) -> Rows:
    """Return a row for each worker, with what it evaluates now, and what it has evaluated of some evaluations."""
    ended = Counter(one.worker for one in evaluations if one.ended_in_run)
    failed = Counter(one.worker for one in evaluations if one.state == "failed")
    own = {one.worker: one for one in run.running}
    workers = sorted({*ended, *own, *run.idle})
    now = [own.get(worker) for worker in workers]
    labels = [one.label if one else "" for one in now]
    idle = "idle" if run.goes_on else ""
    columns = {
        "worker": [str(worker) for worker in workers],
        **({"evaluated": [str(ended[worker]) for worker in workers]} if ended else {}),
        **({"failed": [str(failed[worker]) for worker in workers]} if ended else {}),
        "trial": [text or run.helping.get(worker, idle) for worker, text in zip(workers, labels, strict=True)],
        "epochs": [str(len(one.curve)) if one else "" for one in now],
        "loss": [number(min(one.curve.values())) if one and one.curve else "" for one in now],
        "for": [clock(run.at - one.started) if one and run.goes_on else "" for one in now],
    }
    params = params_shown(all_names(one.params for one in run.running), _OF_WORKERS)
    return _rows({**columns, **{shown: [_value(name, one) for one in now] for name, shown in params.items()}}, labels)


def _rows(columns: Mapping[str, Sequence[str]], labels: Sequence[str]) -> Rows:
    return Rows([_name(name) for name in columns], labels, list(zip(*columns.values(), strict=True)).__getitem__)
