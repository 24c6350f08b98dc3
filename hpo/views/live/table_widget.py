"""Display a table that creates only visible rows, because Textual's DataTable takes 4 s to add 10,000 rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.binding import Binding
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hpo.views.live.table_rows import TableRows

_GAP = 2
_FAR = 10**9
_ARROWS = " \u25b2\u25bc"
# Columns of numbers are aligned to the right.
_LEFT_ALIGNED = ("state", "failure", "reason", "next promotion")


class Table(ScrollView, can_focus=True):
    """Table widget with a cursor.

    If rows are added, the cursor stays on its evaluation, except that a cursor in the first row
    stays in that row.
    """

    BINDINGS: ClassVar[list[Any]] = [
        Binding("up", "move(-1)", "row above", show=False),
        Binding("down", "move(1)", "row below", show=False),
        Binding("pageup", "move_page(-1)", "page up", show=False),
        Binding("pagedown", "move_page(1)", "page down", show=False),
        Binding("home", f"move({-_FAR})", "first row", show=False),
        Binding("end", f"move({_FAR})", "last row", show=False),
        Binding("enter", "open", "open"),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--heading", "table--cursor"}
    DEFAULT_CSS = """
    Table { height: 1fr; }
    Table > .table--heading { text-style: bold; color: $text-primary; }
    Table > .table--cursor { background: $primary 30%; }
    Table:focus > .table--cursor { background: $primary; color: $text; }
    """

    @dataclass
    class Opened(Message):
        """Message that the user has opened the row of an evaluation."""

        key: str

    @dataclass
    class Sorted(Message):
        """Message that the user has clicked the heading of a column."""

        column: int

    _rows = TableRows((), (), lambda _: ())
    _widths: tuple[int, ...] = ()
    _cursor_row = 0

    @property
    def key(self) -> str:
        """Label of the evaluation in the row of the cursor; empty if the table is empty."""
        return self._rows.keys[self._cursor_row] if self._rows.keys else ""

    def show(self, rows: TableRows, from_first: bool = False) -> None:
        """Replace the rows. If `from_first`, move the cursor and the view to the first row."""
        if len(rows.headings) != len(self._widths):
            self._widths = (0,) * len(rows.headings)
        key = self.key if self._cursor_row and not from_first else ""
        row = (
            rows.keys.index(key) if key and key in rows.keys else 0 if not key else self._cursor_row
        )
        self._rows = rows
        self._widen([Text(heading) for heading in rows.headings])
        self.scroll_to(
            y=0 if from_first else self.scroll_offset.y + row - self._cursor_row, animate=False
        )
        self._cursor_row = max(0, min(row, len(rows.keys) - 1))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the widget: the headings for 0, otherwise a row. Textual calls it."""
        row, style = self.scroll_offset.y + y - 1, self.rich_style
        if row >= len(self._rows.keys) and y > 0:
            return Strip.blank(self.scrollable_content_region.width, style)
        found = self._rows.cells(row) if y > 0 else self._rows.headings
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in found]
        self._widen(cells)
        line = Text(end="")
        for heading, cell, width in zip(self._rows.headings, cells, self._widths, strict=True):
            space, is_left = " " * (width - cell.cell_len), _is_left_aligned(heading)
            line.append(" " * _GAP + ("" if is_left else space)).append_text(cell).append(
                space if is_left else ""
            )
        if y == 0 or row == self._cursor_row:
            style += self.get_component_rich_style("table--cursor" if y > 0 else "table--heading")
        left, right = (
            self.scroll_offset.x,
            self.scroll_offset.x + self.scrollable_content_region.width,
        )
        whole = [edge for edge in self._edges if edge <= right]
        # Hide a column of numbers that would be cut off, because a part of a number misleads,
        # except the only column.
        if (
            whole
            and left < whole[-1]
            and len(whole) < len(cells)
            and not _is_left_aligned(self._rows.headings[len(whole)])
        ):
            right = whole[-1]
        strip = Strip(list(line.render(self.app.console))).crop(left, right)
        return strip.extend_cell_length(self.scrollable_content_region.width).apply_style(style)

    @property
    def _edges(self) -> list[int]:
        return list(accumulate(width + _GAP for width in self._widths))

    def _widen(self, cells: list[Text]) -> None:
        """Widen columns to fit these cells, and draw all rows again if a column was too narrow."""
        widths = tuple(
            max(width, cell.cell_len) for width, cell in zip(self._widths, cells, strict=True)
        )
        if widths != self._widths:
            self._widths = widths
            self.call_later(self.refresh)
        size = Size(sum(widths) + _GAP * len(widths), len(self._rows.keys) + 1)
        if size != self.virtual_size:
            self.virtual_size = size

    def _action_move(self, rows: int) -> None:
        self._cursor_row = max(0, min(self._cursor_row + rows, len(self._rows.keys) - 1))
        top = max(
            min(self.scroll_offset.y, self._cursor_row),
            self._cursor_row - self.scrollable_content_region.height + 2,
        )
        self.scroll_to(y=top, animate=False)
        self.refresh()

    def _action_move_page(self, pages: int) -> None:
        self._action_move(pages * max(1, self.scrollable_content_region.height - 2))

    def _action_open(self) -> None:
        if self.key:
            self.post_message(self.Opened(self.key))

    @on(Click)
    def _choose(self, event: Click) -> None:
        row = self.scroll_offset.y + event.y - 1
        if event.y > 0 and row < len(self._rows.keys):
            self._action_move(row - self._cursor_row)
            self._action_open()
        elif event.y == 0:
            edges = [edge for edge in self._edges if edge <= event.x + self.scroll_offset.x]
            if len(edges) < len(self._widths):
                self.post_message(self.Sorted(len(edges)))


def _is_left_aligned(heading: str) -> bool:
    return heading.rstrip(_ARROWS) in _LEFT_ALIGNED
