"""A table of the evaluations that failed, as wide as the terminal."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table

from hpo.report.live.lines import Pen
from hpo.report.tables import empty_table, table_text
from hpo.report.text import printable, short, show_command, value
from hpo.summary import reason_of
from hpo.trials import Evaluation

_NARROWEST = 40  # to which a failure is cut, however much room the columns before it leave
_LONGEST_VALUE = 24
_GAP = 3  # columns


def failed_lines(failed: Sequence[Evaluation], n: int, run_dir: Path) -> list[str]:
    """List the latest of the evaluations that failed, which come first, and how to see more of them."""
    if not failed:
        return ["No evaluation failed."]
    shown = failed[:n]
    width = max(map(cell_len, table_text("", _table(shown)).split("\n")))
    reasons = [reason_of(one) for one in shown]
    if sys.stdout.isatty():
        pen = Pen(max(_NARROWEST, shutil.get_terminal_size().columns - width - _GAP))
        reasons = [pen.cut(pen.text(reason)).plain for reason in reasons]
    whole = width + _GAP + max(map(cell_len, reasons)) + 1  # the table's right edge, a space
    text = table_text("Failed", _table(shown, reasons), width=whole)
    more = f"{show_command(run_dir, shown[0].label)} shows everything about trial {shown[0].label}"
    return [text, printable(f"{_how_many(len(shown), len(failed))} that failed; {more}")]


def _how_many(shown: int, failed: int) -> str:
    if shown < failed:
        return f"the latest {shown} of {failed}" if shown > 1 else f"the last of {failed}"
    return f"all {failed}" if failed > 1 else "the only one"


def _table(failed: Sequence[Evaluation], reasons: Sequence[str] = ()) -> Table:
    """Make a row for each, with the reasons in the last column, if they are given."""
    table = empty_table()
    names = list(dict.fromkeys(name for one in failed for name in one.params))
    for column in ("trial", "island", "worker", "seconds", "epochs", *names):
        table.add_column(column, justify="right", no_wrap=True)
    if reasons:
        table.add_column("failure", no_wrap=True)
    for one, reason in itertools.zip_longest(failed, reasons):
        table.add_row(
            *(one.label, str(one.island), str(one.worker), f"{one.seconds:.1f}", str(max(one.curve, default=0))),
            *(printable(short(value(one.params.get(name, "")), _LONGEST_VALUE)) for name in names),
            *([] if reason is None else [printable(reason)]),
        )
    return table
