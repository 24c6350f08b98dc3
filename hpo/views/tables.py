"""Format tables as text: their style, and tables of individuals.

Individuals have a row each, or a column each if there are many hyperparameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hpo.results.display_names import collect_names, name_params
from hpo.results.summary import Summary
from hpo.text_format import cut_text, format_count, format_value, make_printable

MAX_HYPERPARAMETERS = 12  # shown per individual
_INDIVIDUALS_PER_BLOCK = 3  # columns that fit into a terminal of 80 characters
_LONGEST_NAME = 28
_LONGEST_VALUE = 12

Columns = Sequence[tuple[str, Sequence[str]]]
"""Columns of a table, each a pair of its heading and its cells."""


def make_empty_table() -> Table:
    """Return a table without columns, in the common style."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def make_table(columns: Columns) -> Table:
    """Return a table with right-aligned columns."""
    table = make_empty_table()
    for heading, _ in columns:
        table.add_column(make_printable(heading), justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(make_printable, row))
    return table


def format_table(title: str, table: Table, *below: str, width: int = 1000) -> str:
    """Return `title`, the table with at most `width` characters per line, and the lines `below`."""
    # The width of the terminal is unknown under mpirun: output is a pipe, or a terminal that claims
    # 80 columns.
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table, markup=False)
    lines = [*captured.get().split("\n"), *below]
    printable = [make_printable(line).rstrip() for line in lines if line.strip()]
    return "\n".join([title, *printable, ""])


def format_individuals(
    title: str,
    params: Sequence[Mapping[str, Any]],
    left: Columns,
    right: Columns,
    more: str,
    summary: Summary,
) -> str:
    """Return a table of individuals as text, with `params` between the columns `left` and `right`.

    The command `more` shows hyperparameters that are omitted.
    """
    names = name_params(collect_names(params), [heading for heading, _ in (*left, *right)])
    chosen = list(names)
    if len(chosen) > MAX_HYPERPARAMETERS:  # Otherwise, importances need not be computed.
        chosen = choose_names(params, find_important_names(summary))
    columns = [
        (names[name], [format_value(values.get(name, "")) for values in params]) for name in chosen
    ]
    positions = [str(index + 1) for index in range(len(params))]
    if len(chosen) == len(names):
        return format_table(title, make_table([("", positions), *left, *columns, *right]))
    rows = [*left, *right, *columns]
    blocks = [
        _format_block(title, rows, positions, slice(first, first + _INDIVIDUALS_PER_BLOCK))
        for first in range(0, len(positions), _INDIVIDUALS_PER_BLOCK)
    ]
    rest = format_count(len(names) - len(chosen), "other hyperparameter")
    return "\n".join(blocks) + f"{rest}: {more}\n"


def _format_block(title: str, rows: Columns, positions: Sequence[str], part: slice) -> str:
    """Return a table with a column for each individual in `part`."""
    table = make_empty_table()
    table.add_column("", no_wrap=True)
    for position in positions[part]:
        table.add_column(position, justify="right", no_wrap=True)
    for name, cells in rows:
        shown = [cut_text(cell, _LONGEST_VALUE) for cell in cells[part]]
        table.add_row(cut_text(name, _LONGEST_NAME), *shown)
    return format_table(title, table)


def find_important_names(summary: Summary) -> list[str]:
    """Return the hyperparameters whose importance is significant, the most important first."""
    return [importance.name for importance in summary.importances if importance.is_significant]


def choose_names(params: Sequence[Mapping[str, Any]], important: Sequence[str]) -> list[str]:
    """Return at most 12 hyperparameters to show, in the order of the search space.

    They are the `important` ones first, then those whose values differ most between individuals.
    """
    names = collect_names(params)
    differences = {
        name: _compute_difference([values.get(name, "") for values in params]) for name in names
    }
    ranked = sorted(names, key=lambda name: -differences[name])
    preferred = dict.fromkeys([*(name for name in important if name in names), *ranked])
    chosen = list(preferred)[:MAX_HYPERPARAMETERS]
    return [name for name in names if name in chosen]


def _compute_difference(values: Sequence[Any]) -> float:
    """Return how different values are, from 0 (all equal) to 1.

    For numbers, this is half of their range, divided by the largest absolute value. For other
    values, it grows with the number of distinct values.
    """
    if all(type(item) in (int, float) for item in values):
        largest = max(map(abs, values))
        return float(max(values) / largest - min(values) / largest) / 2 if largest else 0.0
    return (len(set(values)) - 1) / max(1, len(values) - 1)
