"""A run as a table, every evaluation one row, for pandas, spreadsheets and other programs."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import ModuleType
from typing import Any

from hpo.errors import UsageError
from hpo.results.names import METRIC, PARAM
from hpo.results.reader import RunReader
from hpo.store.evaluations import Evaluation
from hpo.store.front import front
from hpo.text import escaped, showable

FORMATS = ("csv", "json", "parquet")
_FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # OWASP, "CSV Injection"; the last four are full-width
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")

# Columns with what they hold. None begins with PARAM or METRIC, so that no hyperparameter or metric, whatever its name,
# is taken for another column.
_FRONT = "front"
_BEFORE = {"study": "text", "trial": "whole", "state": "text", "loss": "number"}
_AFTER = {
    "island": "whole",
    "worker": "whole",
    "generation": "whole",
    "propagator": "text",
    "started": "time",
    "ended": "time",
    "seconds": "number",
    "epochs": "whole",
    "failure": "text",
    "imported_from": "text",
    "confirms": "whole",
    "seed": "whole",
    "inherits": "whole",
    "workers": "whole",
    "curve": "numbers",
}


@dataclass(frozen=True)
class Table:
    """Rows of a value per column, None where there is none; `columns` says what each holds: "any" for hyperparameters.

    Values are finite numbers, booleans, texts that UTF-8 has bytes for, times in UTC, and lists of numbers and None.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]


def table_of(run: RunReader) -> Table:
    """Return all evaluations of a run as a table; those that confirm the best, of a study of their own, come last.

    Each hyperparameter of the search space has a column, even where nothing has been evaluated; and where there are
    several objectives, there is one for whether an evaluation is on the front.
    """
    evaluations, several = run.evaluations(), run.manifest.objectives.are_several
    rows = [_row(run.manifest.study, evaluation) for evaluation in evaluations]
    if several:
        best = {one.trial for one in front(evaluations, run.manifest.objectives)}
        rows = [{**row, _FRONT: row["trial"] in best} for row in rows]
    rows += [_row(run.manifest.confirming_study, evaluation) for evaluation in run.confirmations(all_plans=True)]
    params = dict.fromkeys([showable(PARAM + name) for name in run.manifest.space] + _beginning(PARAM, rows), "any")
    metrics = dict.fromkeys(sorted(_beginning(METRIC, rows)), "number")
    columns = {**_BEFORE, **({_FRONT: "truth"} if several else {}), **params, **metrics, **_AFTER}
    return Table(columns, [[row.get(column) for column in columns] for row in rows])


def _beginning(prefix: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list({column: None for row in rows for column in row if column.startswith(prefix)})


def _row(study: str, evaluation: Evaluation) -> dict[str, Any]:
    placed = evaluation.state != "waiting"
    bred = placed and not evaluation.imported_from and evaluation.confirms is None
    row = {
        "study": study,
        "trial": evaluation.trial,
        "state": evaluation.state,
        "loss": evaluation.loss,
        **{PARAM + name: value for name, value in evaluation.params.items()},
        **{METRIC + name: value for name, value in evaluation.metrics.items()},
        "island": evaluation.island if placed else None,
        "worker": evaluation.worker if placed else None,
        "generation": evaluation.generation if bred else None,
        "propagator": evaluation.propagator or None,
        "started": _time(evaluation.started),
        "ended": _time(evaluation.ended),
        "seconds": evaluation.seconds if evaluation.has_ended else None,
        "epochs": max(evaluation.curve, default=0),
        "failure": evaluation.failure if evaluation.state == "failed" else None,
        "imported_from": evaluation.imported_from or None,
        "confirms": evaluation.confirms,
        "seed": evaluation.seed,
        "inherits": evaluation.inherits,
        "workers": len(evaluation.workers) if placed else None,
        "curve": [_plain(evaluation.curve[epoch]) for epoch in sorted(evaluation.curve)],
    }
    return {showable(column): _plain(value) for column, value in row.items()}


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, timezone.utc) if math.isfinite(seconds) else None


def _plain(value: Any) -> Any:
    """Return None for NaN and infinity, a text with what UTF-8 lacks escaped, and other values as they are."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return showable(value) if isinstance(value, str) else value


def writer(to: str) -> Callable[[Table], bytes]:
    """Return a function that turns a table into one of FORMATS; raises UsageError for others and without a package."""
    if to == "csv":
        return _csv
    if to == "json":
        return _json
    if to != "parquet":
        raise UsageError(f"--to {to}: must be one of {', '.join(FORMATS)}")
    try:
        import pyarrow.parquet
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--to parquet: {reason}; pip install 'hpo-islands[parquet]' would do") from None
    return lambda table: _parquet(table, pyarrow)


def _csv(table: Table) -> bytes:
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(map(_cell, table.columns))
    rows.writerows(map(_cell, row) for row in table.rows)
    return lines.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return times as ISO 8601, curves as JSON, and texts so that no program which reads them acts upon them."""
    if isinstance(value, datetime):
        return _iso(value)
    if isinstance(value, list):
        return json.dumps(value)
    return _inert(value) if isinstance(value, str) else value


def _inert(text: str) -> str:
    """Return a text, control characters escaped, with an apostrophe before what spreadsheets take for a formula."""
    shown = "".join(escaped(c) if _is_control(c) else c for c in text)
    return f"'{shown}" if shown.startswith(_FORMULAS) else shown


def _is_control(character: str) -> bool:
    """Tell whether a character is a control character, or changes the direction of writing."""
    control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return control or unicodedata.bidirectional(character) in _TURNS


def _json(table: Table) -> bytes:
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    lines = ",\n ".join(json.dumps(row, default=_iso, allow_nan=False) for row in rows)
    return f"[{lines}]\n".encode()


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="microseconds")


def _parquet(table: Table, arrow: ModuleType) -> bytes:
    types = {
        "text": arrow.string(),
        "whole": arrow.int64(),
        "number": arrow.float64(),
        "truth": arrow.bool_(),
        "numbers": arrow.list_(arrow.float64()),
        "time": arrow.timestamp("us", tz="UTC"),
    }
    columns = {}
    for place, (name, holds) in enumerate(table.columns.items()):
        columns[name] = _array([row[place] for row in table.rows], types.get(holds), arrow)
    sink = io.BytesIO()
    arrow.parquet.write_table(arrow.table(columns), sink)
    return sink.getvalue()


def _array(values: Sequence[Any], expected: Any, arrow: ModuleType) -> Any:
    """Return a column of one type: the expected, that of all values, numbers if just some are whole, or text."""
    kinds = {type(value) for value in values if value is not None}
    try:
        if expected is not None or len(kinds) <= 1 or kinds == {int, float}:
            return arrow.array(values, expected)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, OverflowError):  # such as whole numbers beyond 64 bits
        pass
    return arrow.array([None if value is None else str(value) for value in values])
