"""A table of the evaluations that failed, as wide as the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from hpo.results.names import all_names, params_shown
from hpo.results.summary import reason_of
from hpo.store.evaluations import Evaluation
from hpo.text import printable, short, show_command, tenths, value
from hpo.views.grid import filled_table, table_text
from hpo.views.individuals import MOST_SHOWN

_NARROWEST = 40  # columns that a failure gets at least, however little room the others leave
_LONGEST_VALUE = 24
_GAP = 3  # columns


def failed_lines(failed: Sequence[Evaluation], n: int, run_dir: Path) -> list[str]:
    """Return lines on the latest `n` evaluations that failed, and how to see more; `failed` has the latest first."""
    if not failed:
        return ["No evaluation failed."]
    shown = failed[:n]
    width = max(map(cell_len, table_text("", _table(shown)).split("\n")))
    reasons = [printable(reason_of(one)) for one in shown]
    if sys.stdout.isatty():
        room = max(_NARROWEST, shutil.get_terminal_size().columns - width - _GAP)
        reasons = [_cut(reason, room) for reason in reasons]
    whole = width + _GAP + max(map(cell_len, ["failure", *reasons])) + 1  # the table's right edge, a space
    text = table_text("Failed", _table(shown, reasons), width=whole)
    more = f"{show_command(run_dir, shown[0].label)} shows everything about trial {shown[0].label}"
    if (many := len(_params(shown))) > MOST_SHOWN:
        more += f", its {many} hyperparameters too"
    return [text, printable(f"{_how_many(len(shown), len(failed))} that failed; {more}")]


def _cut(reason: str, room: int) -> str:
    text = Text(reason)
    text.truncate(room, overflow="ellipsis")
    return text.plain


def _how_many(shown: int, failed: int) -> str:
    if shown < failed:
        return f"the latest {shown} of {failed}" if shown > 1 else f"the last of {failed}"
    return f"all {failed}" if failed > 1 else "the only one"


def _table(failed: Sequence[Evaluation], reasons: Sequence[str] = ()) -> Table:
    """Return a table with a row for each evaluation, and with the reasons in the last column, if they are given."""
    columns = [
        ("trial", [one.label for one in failed]),
        ("island", [str(one.island) for one in failed]),
        ("worker", [str(one.worker) for one in failed]),
        ("seconds", [tenths(one.seconds) for one in failed]),
        ("epochs", [str(max(one.curve, default=0)) for one in failed]),
    ]
    names = params_shown(_params(failed), [*(name for name, _ in columns), "failure"])
    if len(names) <= MOST_SHOWN:  # more would leave no room for what matters here
        for name, shown in names.items():
            columns.append((shown, [short(value(one.params.get(name, "")), _LONGEST_VALUE) for one in failed]))
    if not reasons:
        return filled_table(columns)
    table = filled_table([*columns, ("failure", list(reasons))])
    table.columns[-1].justify = "left"
    return table


def _params(failed: Sequence[Evaluation]) -> list[str]:
    return all_names(one.params for one in failed)
