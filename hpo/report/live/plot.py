"""A small plot in a terminal: steps going down, of braille dots, or of plain characters where there are no others."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bit of each dot, by row and column


class Steps:
    """A value that only falls, over time: `points` are the moments of its changes, from 0 to `end`, and its values.

    The scale is logarithmic where all values are positive and some are more than 20 times as high as others.
    """

    def __init__(self, points: Sequence[tuple[float, float]], end: float) -> None:
        self._points = points
        self._end = max([end, *(moment for moment, _ in points)])
        values = [value for _, value in points]
        self.logarithmic = min(values) > 0 and max(values) / min(values) > 20
        self.high, self.low = max(values), min(values)

    def draw(self, width: int, height: int, braille: bool = True) -> list[str]:
        """Draw lines of text, the highest first."""
        columns, rows = (2 * width, 4 * height) if braille else (width, height)
        levels = [self._level(column / max(1, columns - 1), rows) for column in range(columns)]
        dots: set[tuple[int, int]] = set()
        before = next((level for level in levels if level is not None), 0)
        for column, level in enumerate(levels):
            if level is not None:
                dots.update((row, column) for row in range(min(before, level), max(before, level) + 1))
                before = level
        return [self._line(dots, row, width, braille) for row in range(height)]

    def _level(self, share: float, rows: int) -> int | None:
        """Give the row for a moment, counted from the top; None before there was a value."""
        moment = share * self._end
        value = next((value for time, value in reversed(self._points) if time <= moment), None)
        if value is None:
            return None
        scale = math.log if self.logarithmic else lambda x: x / 2  # halves: a difference of floats may be too large
        low, high, here = scale(self.low), scale(self.high), scale(value)
        return round((high - here) / (high - low) * (rows - 1)) if high > low else rows - 1

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
