"""Format tables of individuals: a row per individual, or a column per individual if there are many hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpo.results.display_names import collect_names, name_params
from hpo.results.summary import Summary
from hpo.text_format import cut_text, format_count, format_value
from hpo.views.table_format import format_table, make_empty_table, make_table

MAX_HYPERPARAMETERS = 12  # shown per individual
_INDIVIDUALS_PER_BLOCK = 3  # columns that fit into a terminal of 80 characters
_LONGEST_NAME, _LONGEST_VALUE = 28, 12

Columns = Sequence[tuple[str, Sequence[str]]]  # pairs of a heading and its cells


def format_individuals(
    title: str,
    params: Sequence[Mapping[str, Any]],
    left: Columns,
    right: Columns,
    more: str,
    find_important: Callable[[], Sequence[str]],
) -> str:
    """Return a table of individuals as text, with their hyperparameters between other columns.

    Args:
        title: Title above the table.
        params: Hyperparameters of each individual.
        left: Columns to the left of the hyperparameters.
        right: Columns to the right of the hyperparameters.
        more: Command that shows the omitted hyperparameters.
        find_important: Function that returns the hyperparameters to prefer, in order of preference.
            It takes seconds, and is called only if not all hyperparameters can be shown.
    """
    names = name_params(collect_names(params), [heading for heading, _ in (*left, *right)])
    chosen = list(names)
    if len(chosen) > MAX_HYPERPARAMETERS:
        chosen = choose_names(params, find_important())
    columns = [
        (names[name], [format_value(values.get(name, "")) for values in params]) for name in chosen
    ]
    positions = [str(index + 1) for index in range(len(params))]
    if len(chosen) == len(names):
        return format_table(title, make_table([("", positions), *left, *columns, *right]))
    blocks = [
        _format_columns(
            title,
            [*left, *right, *columns],
            positions[first : first + _INDIVIDUALS_PER_BLOCK],
            first,
        )
        for first in range(0, len(positions), _INDIVIDUALS_PER_BLOCK)
    ]
    rest = format_count(len(names) - len(chosen), "other hyperparameter")
    return "\n".join(blocks) + f"{rest}: {more}\n"


def find_important_names(summary: Summary) -> list[str]:
    """Return the names of the hyperparameters whose importance is significant, the most important first."""
    return [importance.name for importance in summary.importances if importance.is_significant]


def choose_names(params: Sequence[Mapping[str, Any]], important: Sequence[str]) -> list[str]:
    """Return the names of the hyperparameters to show, at most 12, in the order of the search space.

    The `important` hyperparameters are chosen first, then those whose values differ most between
    the individuals.
    """
    names = collect_names(params)
    ranked = sorted(
        names, key=lambda name: -_compute_difference([values.get(name, "") for values in params])
    )
    chosen = list(dict.fromkeys([*(name for name in important if name in names), *ranked]))[
        :MAX_HYPERPARAMETERS
    ]
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


def _format_columns(title: str, rows: Columns, positions: Sequence[str], first: int) -> str:
    """Return a table as text: one column per heading in `positions`, for the individuals from index `first`."""
    table = make_empty_table()
    table.add_column("", no_wrap=True)
    for position in positions:
        table.add_column(position, justify="right", no_wrap=True)
    for name, cells in rows:
        own = cells[first : first + len(positions)]
        table.add_row(
            cut_text(name, _LONGEST_NAME), *(cut_text(cell, _LONGEST_VALUE) for cell in own)
        )
    return format_table(title, table)
