"""Define the style of all tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hpo.text_format import make_printable


def make_empty_table() -> Table:
    """Return a table without columns, in the common style."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def make_table(columns: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """Return a table with right-aligned columns. Each column is given as a pair of its heading and its cells."""
    table = make_empty_table()
    for heading, _ in columns:
        table.add_column(make_printable(heading), justify="right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(make_printable, row))
    return table


def format_table(title: str, table: Table, *below: str, width: int = 1000) -> str:
    """Return a text: `title`, the table with at most `width` characters per line, and the lines `below`."""
    # The width of the terminal is unknown under mpirun: output is a pipe, or a terminal that claims
    # 80 columns.
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table, markup=False)
    lines = [
        make_printable(line).rstrip()
        for line in [*captured.get().split("\n"), *below]
        if line.strip()
    ]
    return "\n".join([title, *lines, ""])
