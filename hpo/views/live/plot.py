"""A small plot in a terminal: descending steps, of braille dots, or of ASCII characters where it has no dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpo.text import number
from hpo.views.scale import scale_of

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bit of each dot, by row and column


class Steps:
    """A loss that only falls, over time: `points` are pairs of a moment, from 0 to `end`, and the loss from then on.

    The scale is that for a run with these `losses`; `beyond` are the values beyond it, which are the first ones.
    """

    def __init__(self, points: Sequence[tuple[float, float]], end: float, losses: Sequence[float] = ()) -> None:
        self._points = points
        self._end = max([end, *(moment for moment, _ in points)])
        self.scale = scale_of([value for _, value in points], losses)
        self.beyond = [value for _, value in points if self.scale.beyond(value)]

    def draw(self, width: int, height: int, braille: bool = True) -> list[str]:
        """Return the plot as lines, the highest first; values beyond the scale have the first line for themselves."""
        if not self.beyond:
            return self._draw(width, height, braille)
        return [self._edge(width), *self._draw(width, height - 1, braille)]

    def labels(self, rows: int) -> list[str]:
        """Return labels for the lines of a plot, two or more: the highest value, and both ends of the scale."""
        scale = self.scale
        highest = number(scale.highest) if scale.highest > scale.lowest else ""
        above = [*map(number, self.beyond[:1]), highest][: rows - 1]
        return [*above, *[""] * (rows - 1 - len(above)), number(scale.lowest)]

    def _edge(self, width: int) -> str:
        """Return a line with marks where the value was beyond the scale and, if there is room, how many values were."""
        moments = self._points[0][0], self._points[len(self.beyond)][0]
        first, last = (math.ceil(moment / (self._end or 1) * (width - 1)) for moment in moments)
        marks, told = "^" * max(1, last - first), f"{len(self.beyond)} beyond"
        line = " " * first + marks
        if len(line) + 1 + len(told) <= width:
            line += f" {told}"
        elif len(told) < first:
            line = f"{told:>{first - 1}} {marks}"
        return line.ljust(width)

    def _draw(self, width: int, height: int, braille: bool) -> list[str]:
        columns, rows = (2 * width, 4 * height) if braille else (width, height)
        levels = [self._level(column / max(1, columns - 1), rows) for column in range(columns)]
        dots: set[tuple[int, int]] = set()
        before = 0 if self.beyond else next((level for level in levels if level is not None), 0)
        for column, level in enumerate(levels):
            if level is not None:
                dots.update((row, column) for row in range(min(before, level), max(before, level) + 1))
                before = level
        return [self._line(dots, row, width, braille) for row in range(height)]

    def _level(self, share: float, rows: int) -> int | None:
        """Return the row for a moment, counted from the top; None where no value is on the scale."""
        moment = share * self._end
        value = next((value for time, value in reversed(self._points) if time <= moment), None)
        if value is None or self.scale.beyond(value):
            return None
        return round((1 - self.scale.share(value)) * (rows - 1))

    def _line(self, dots: set[tuple[int, int]], row: int, width: int, braille: bool) -> str:
        if not braille:
            return "".join("*" if (row, column) in dots else " " for column in range(width))
        return "".join(_cell(dots, row, column) for column in range(width))


def _cell(dots: set[tuple[int, int]], row: int, column: int) -> str:
    bits = sum(
        bit
        for down, pair in enumerate(_BRAILLE)
        for right, bit in enumerate(pair)
        if (4 * row + down, 2 * column + right) in dots
    )
    return chr(0x2800 + bits) if bits else " "
