"""Define the widgets of `hpo watch`: a table, and a plot of losses with braille dots."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
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
from textual.widget import Widget

from hpo.text_format import format_number
from hpo.views.live.table_rows import TableRows
from hpo.views.loss_scale import make_loss_scale

# Bit of each dot by row and column.
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY_CELL = 0x2800
_GAP = 2
_FAR = 10**9
_ARROWS = " \u25b2\u25bc"
# Columns of numbers are aligned to the right.
_LEFT_ALIGNED = ("state", "failure", "reason", "next promotion")


class Table(ScrollView, can_focus=True):
    """Table widget with a cursor, which creates only visible rows.

    Textual's DataTable takes 4 s to add 10,000 rows. If rows are added, the cursor stays on its
    evaluation, except that a cursor in the first row stays in that row.
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
        row = 0
        if self._cursor_row and self.key and not from_first:
            is_kept = self.key in rows.keys
            row = rows.keys.index(self.key) if is_kept else self._cursor_row
        self._rows = rows
        self._widen([Text(heading) for heading in rows.headings])
        y = 0 if from_first else self.scroll_offset.y + row - self._cursor_row
        self.scroll_to(y=y, animate=False)
        self._cursor_row = max(0, min(row, len(rows.keys) - 1))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return line `y` of the widget: the headings for 0, otherwise a row. Textual calls it."""
        row = self.scroll_offset.y + y - 1
        width = self.scrollable_content_region.width
        style = self.rich_style
        if row >= len(self._rows.keys) and y > 0:
            return Strip.blank(width, style)
        found = self._rows.cells(row) if y > 0 else self._rows.headings
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in found]
        self._widen(cells)
        if y == 0 or row == self._cursor_row:
            style += self.get_component_rich_style("table--cursor" if y > 0 else "table--heading")
        left = self.scroll_offset.x
        strip = Strip(list(self._join_cells(cells).render(self.app.console)))
        strip = strip.crop(left, self._find_right_edge(left, left + width))
        return strip.extend_cell_length(width).apply_style(style)

    def _join_cells(self, cells: list[Text]) -> Text:
        line = Text(end="")
        for heading, cell, width in zip(self._rows.headings, cells, self._widths, strict=True):
            space = " " * (width - cell.cell_len)
            before, after = ("", space) if _is_left_aligned(heading) else (space, "")
            line.append(" " * _GAP + before).append_text(cell).append(after)
        return line

    def _find_right_edge(self, left: int, right: int) -> int:
        """Return where to cut off a line that is visible from `left` to `right`.

        A column of numbers is hidden if it would be cut off: a part of a number misleads.
        """
        whole = [edge for edge in self._edges if edge <= right]
        if not whole or left >= whole[-1] or len(whole) == len(self._widths):
            return right
        return right if _is_left_aligned(self._rows.headings[len(whole)]) else whole[-1]

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


class Plot(Widget):
    """Widget that shows a plot of losses and fills its area."""

    DEFAULT_CSS = """
    Plot { height: 1fr; max-height: 12; margin: 1 1 0 1; }
    Plot.-empty { display: none; }
    """
    _plot_arguments: tuple[str, Any, Any, Any] | None = None

    def plot(
        self,
        title: str,
        points: Sequence[tuple[float, float]],
        losses: Sequence[float],
        ends: tuple[str, str],
    ) -> None:
        """Draw a plot with `plot_steps`, or hide it if there are fewer than two points."""
        self._plot_arguments = title, points, losses, ends
        self.set_class(len(points) < 2, "-empty")
        self.refresh()

    def render(self) -> Text:
        """Return the plot as text."""
        return plot_steps(*self._plot_arguments, self.size) if self._plot_arguments else Text()


def plot_steps(
    title: str,
    points: Sequence[tuple[float, float]],
    losses: Sequence[float],
    ends: tuple[str, str],
    size: tuple[int, int],
) -> Text:
    """Return a plot of a loss over time as text. The line is horizontal between two points.

    Args:
        points: Pairs of a time and the loss from this time on. Times start at 0; the final time is
            the right edge.
        losses: Losses of all complete evaluations, which determine the scale; points above the
            scale are not drawn.
        ends: Texts below the left and the right edge.
        size: Width and height in characters, including the title and `ends`.
    """
    drawn = [(moment, loss) for moment, loss in points if math.isfinite(loss)]
    scale = make_loss_scale([loss for _, loss in drawn], losses)
    height = size[1] - 2
    if not drawn or height < 2:
        return Text()
    labels = [""] * height
    labels[-1] = format_number(scale.lowest)
    if scale.highest > scale.lowest:
        labels[0] = format_number(scale.highest)
    left = max(map(len, labels))
    width = max(2, size[0] - left - 1)
    moments = [moment for moment, _ in drawn]
    fractions = [
        None if scale.is_out_of_range(loss) else scale.compute_fraction(loss) for _, loss in drawn
    ]
    indices = [
        bisect_right(moments, moments[-1] * dot / (2 * width - 1)) - 1 for dot in range(2 * width)
    ]
    lines = _draw_levels([None if index < 0 else fractions[index] for index in indices], height)
    text = Text(f"{title}{', logarithmic' if scale.is_logarithmic else ''}", "bold", no_wrap=True)
    for label, line in zip(labels, lines, strict=True):
        text.append_text(Text.assemble(f"\n{label:>{left}} ", (line, "green"), style="not bold"))
    return text.append(
        f"\n{'':{left}} {ends[0]}{ends[1]:>{max(0, width - len(ends[0]))}}", "not bold"
    )


def _draw_levels(levels: Sequence[float | None], height: int) -> list[str]:
    """Return a curve, given by its heights from 0 to 1 (None if empty), as braille characters."""
    cells = [[_EMPTY_CELL] * (len(levels) // 2) for _ in range(height)]
    before = None
    for column, level in enumerate(levels):
        row = None if level is None else round((1 - level) * (4 * height - 1))
        if row is not None:
            start = row if before is None else before
            for dot in range(min(start, row), max(start, row) + 1):
                cells[dot // 4][column // 2] |= _DOT_BITS[dot % 4][column % 2]
        before = row
    return ["".join(map(chr, line)).replace(chr(_EMPTY_CELL), " ") for line in cells]
