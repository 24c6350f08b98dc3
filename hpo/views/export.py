"""Export a run as a table with a row per evaluation, for pandas, spreadsheets and others."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType
from typing import Any

from hpo.errors import UsageError
from hpo.results.display_names import METRIC_PREFIX, PARAM_PREFIX
from hpo.results.reader import RunReader
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import find_front
from hpo.text_format import escape_invisible, escape_unencodable
from hpo.views.evaluation_details import format_time, list_fields, make_plain_value

FORMATS = ("csv", "json", "parquet")
# OWASP, "CSV Injection"; the last four are full-width.
_FORMULA_STARTS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
_BIDI_CONTROLS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")

# Names and types of columns. No name begins with PARAM_PREFIX or METRIC_PREFIX, so that a
# hyperparameter or metric with the same name gets a column of its own.
_FRONT_COLUMN = "front"
_FIRST_COLUMNS = {"study": "text", "trial": "whole", "state": "text", "loss": "number"}
_LAST_COLUMNS = {
    "island": "whole",
    "worker": "whole",
    "generation": "whole",
    "propagator": "text",
    "started": "time",
    "ended": "time",
    "seconds": "number",
    "epochs": "whole",
    "ranks": "whole",
    "hosts": "text",
    "gpus": "whole",
    "failure": "text",
    "imported_from": "text",
    "confirms": "whole",
    "seed": "whole",
    "inherits": "whole",
    "curve": "numbers",
}


@dataclass(frozen=True)
class EvaluationTable:
    """A table with one row per evaluation; None marks a missing value.

    Values are finite numbers, booleans, texts that UTF-8 can encode, times in UTC, and lists of
    numbers and None.
    """

    column_types: Mapping[str, str]
    """Type of each column by its name: "text", "whole" (integer), "number" (float), "truth"
    (boolean), "numbers" (list of floats), "time", or "any" (hyperparameters)."""
    rows: Sequence[Sequence[Any]]


def make_evaluation_table(run: RunReader) -> EvaluationTable:
    """Return a table of all evaluations of a run: first the search, then the confirmation.

    Each hyperparameter of the search space has a column, even if no evaluation has a value for it.
    With several objectives, a column of booleans marks the evaluations on the Pareto front.
    """
    evaluations = run.read_evaluations()
    objectives = run.manifest.objectives
    rows = [_make_row(run.manifest.study, evaluation) for evaluation in evaluations]
    front_column = {}
    if objectives.is_multi_objective:
        front_column = {_FRONT_COLUMN: "truth"}
        on_front = {evaluation.trial for evaluation in find_front(evaluations, objectives)}
        for row in rows:
            row[_FRONT_COLUMN] = row["trial"] in on_front
    confirmations = run.read_confirmations(all_plans=True)
    rows += [_make_row(run.manifest.confirmation_study, each) for each in confirmations]
    space = [escape_unencodable(PARAM_PREFIX + name) for name in run.manifest.space]
    params = [*space, *_find_columns(PARAM_PREFIX, rows)]
    metrics = sorted(_find_columns(METRIC_PREFIX, rows))
    columns = {
        **_FIRST_COLUMNS,
        **front_column,
        **dict.fromkeys(params, "any"),
        **dict.fromkeys(metrics, "number"),
        **_LAST_COLUMNS,
    }
    return EvaluationTable(columns, [[row.get(column) for column in columns] for row in rows])


def _find_columns(prefix: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list({column: None for row in rows for column in row if column.startswith(prefix)})


def _make_row(study: str, evaluation: Evaluation) -> dict[str, Any]:
    losses = [evaluation.curve[epoch] for epoch in sorted(evaluation.curve)]
    row = {
        **list_fields(study, evaluation),
        **{PARAM_PREFIX + name: value for name, value in evaluation.params.items()},
        **{METRIC_PREFIX + name: value for name, value in evaluation.metrics.items()},
        "ranks": evaluation.ranks or None,
        "hosts": ", ".join(evaluation.hosts) or None,
        "gpus": evaluation.gpu_count if evaluation.hosts else None,
        "curve": [make_plain_value(loss) for loss in losses],
    }
    return {escape_unencodable(column): make_plain_value(value) for column, value in row.items()}


def find_writer(format_name: str) -> Callable[[EvaluationTable], bytes]:
    """Return the function that encodes a table as csv, json or parquet."""
    if format_name == "csv":
        return _encode_csv
    if format_name == "json":
        return _encode_json
    if format_name != "parquet":
        raise UsageError(f"--to must be one of {', '.join(FORMATS)}, got {format_name!r}.")
    try:
        import pyarrow.parquet
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"--to parquet needs pyarrow: {reason}. Run: pip install 'hpo-islands[parquet]'"
        ) from None
    return lambda table: _encode_parquet(table, pyarrow)


def _encode_csv(table: EvaluationTable) -> bytes:
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(map(_format_cell, table.column_types))
    rows.writerows(map(_format_cell, row) for row in table.rows)
    return lines.getvalue().encode()


def _format_cell(value: Any) -> Any:
    """Format times as ISO 8601 and lists as JSON, and escape controls and formulas in texts."""
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, list):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    shown = "".join(escape_invisible(c) if _is_control(c) else c for c in value)
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


def _is_control(character: str) -> bool:
    """Return whether a character is a control character or changes the direction of writing."""
    control = unicodedata.category(character) == "Cc" and character not in "\n\t"
    return control or unicodedata.bidirectional(character) in _BIDI_CONTROLS


def _encode_json(table: EvaluationTable) -> bytes:
    rows = [dict(zip(table.column_types, row, strict=True)) for row in table.rows]
    lines = ",\n ".join(json.dumps(row, default=format_time, allow_nan=False) for row in rows)
    return f"[{lines}]\n".encode()


def _encode_parquet(table: EvaluationTable, arrow: ModuleType) -> bytes:
    types = {
        "text": arrow.string(),
        "whole": arrow.int64(),
        "number": arrow.float64(),
        "truth": arrow.bool_(),
        "numbers": arrow.list_(arrow.float64()),
        "time": arrow.timestamp("us", tz="UTC"),
    }
    columns = {}
    for index, (name, holds) in enumerate(table.column_types.items()):
        columns[name] = _make_array([row[index] for row in table.rows], types.get(holds), arrow)
    sink = io.BytesIO()
    arrow.parquet.write_table(arrow.table(columns), sink)
    return sink.getvalue()


def _make_array(values: Sequence[Any], expected: Any, arrow: ModuleType) -> Any:
    """Return a column in which all values have one type.

    It is `expected`, or by default the common type of the values, or float for a mix of int and
    float. If a value does not fit, all values are converted to text.
    """
    kinds = {type(value) for value in values if value is not None}
    try:
        if expected is not None or len(kinds) <= 1 or kinds == {int, float}:
            return arrow.array(values, expected)
    # For example integers of more than 64 bits.
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, OverflowError):
        pass
    return arrow.array([None if value is None else str(value) for value in values])
