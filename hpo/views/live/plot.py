"""Plot losses in a terminal with braille dots."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from rich.text import Text
from textual.widget import Widget

from hpo.text_format import format_number
from hpo.views.loss_scale import make_loss_scale

# Bit of each dot by row and column.
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY_CELL = 0x2800


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
        """Draw a plot, or hide it if there are fewer than two points. The arguments are those of `plot_steps`."""
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
        title: Title above the plot.
        points: Pairs of a time and the loss from this time on. Times start at 0; the final time is
            the right edge.
        losses: Losses of all complete evaluations, which determine the scale; points above the
            scale are not drawn.
        ends: Texts below the left and the right edge.
        size: Width and height in characters, including the title and `ends`.
    """
    drawn = [(moment, loss) for moment, loss in points if math.isfinite(loss)]
    scale, height = make_loss_scale([loss for _, loss in drawn], losses), size[1] - 2
    if not drawn or height < 2:
        return Text()
    labels = [
        format_number(scale.highest) if scale.highest > scale.lowest else "",
        *[""] * (height - 2),
        format_number(scale.lowest),
    ]
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
    """Return a curve as lines of braille characters.

    Each level is the height of the curve in one column of dots, from 0 to 1, or None for an empty
    column.
    """
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
