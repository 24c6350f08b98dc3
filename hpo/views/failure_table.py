"""Format a table of failed evaluations that fits the width of the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from hpo.results.display_names import collect_names, name_params
from hpo.results.failures import format_reason
from hpo.store.evaluations import Evaluation
from hpo.text_format import cut_text, format_tenths, format_value, make_printable, make_show_command
from hpo.views.tables import MAX_HYPERPARAMETERS, format_table, make_table

# Characters of the column of failures, even if the table is then wider than the terminal.
_MIN_FAILURE_WIDTH = 40
_LONGEST_VALUE = 24
_GAP = 3  # characters between columns


def format_failed(failed: Sequence[Evaluation], n: int, run_dir: Path) -> list[str]:
    """Return a table of the latest `n` failed evaluations, and a command that shows more.

    Args:
        failed: All failed evaluations, the latest first.
        run_dir: The run directory, for the command.
    """
    if not failed:
        return ["No evaluation failed."]
    shown = failed[:n]
    width = max(map(cell_len, format_table("", _make_failure_table(shown)).split("\n")))
    reasons = [make_printable(format_reason(evaluation)) for evaluation in shown]
    if sys.stdout.isatty():
        room = max(_MIN_FAILURE_WIDTH, shutil.get_terminal_size().columns - width - _GAP)
        reasons = [_truncate(reason, room) for reason in reasons]
    # The right edge of the table is a space.
    whole = width + _GAP + max(map(cell_len, ["failure", *reasons])) + 1
    text = format_table("Failed", _make_failure_table(shown, reasons), width=whole)
    latest = shown[0].label
    more = f"{make_show_command(run_dir, latest)} shows everything about trial {latest}"
    if (many := len(_find_param_names(shown))) > MAX_HYPERPARAMETERS:
        more += f", including its {many} hyperparameters"
    return [text, make_printable(f"{_describe_count(len(shown), len(failed))}; {more}")]


def _truncate(reason: str, room: int) -> str:
    text = Text(reason)
    text.truncate(room, overflow="ellipsis")
    return text.plain


def _describe_count(shown: int, failed: int) -> str:
    if shown < failed:
        latest = f"the latest {shown}" if shown > 1 else "the latest"
        return f"{latest} of {failed} failures"
    return f"all {failed} failures" if failed > 1 else "the only failure"


def _make_failure_table(failed: Sequence[Evaluation], reasons: Sequence[str] = ()) -> Table:
    """Return a table with a row per evaluation, and with `reasons` as its final column if given."""
    columns = [
        ("trial", [evaluation.label for evaluation in failed]),
        ("island", [str(evaluation.island) for evaluation in failed]),
        ("worker", [str(evaluation.worker) for evaluation in failed]),
        ("seconds", [format_tenths(evaluation.seconds) for evaluation in failed]),
        ("epochs", [str(max(evaluation.curve, default=0)) for evaluation in failed]),
    ]
    names = name_params(_find_param_names(failed), [*(name for name, _ in columns), "failure"])
    if len(names) <= MAX_HYPERPARAMETERS:  # More columns would leave no space for the reasons.
        for name, shown in names.items():
            values = [format_value(evaluation.params.get(name, "")) for evaluation in failed]
            columns.append((shown, [cut_text(value, _LONGEST_VALUE) for value in values]))
    if not reasons:
        return make_table(columns)
    table = make_table([*columns, ("failure", list(reasons))])
    table.columns[-1].justify = "left"
    return table


def _find_param_names(failed: Sequence[Evaluation]) -> list[str]:
    return collect_names(evaluation.params for evaluation in failed)
