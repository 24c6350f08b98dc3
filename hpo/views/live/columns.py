"""Hyperparameters in columns, as many as there is room for; the heading says how many more there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from hpo.results.names import all_names, params_shown
from hpo.text import value
from hpo.views.live.lines import GAP, Pen

_NARROWEST = 5  # columns of a name that is cut: its values are no wider, and no other name begins like it
_WIDEST = 16


class Columns:
    """The columns for some individuals, which are at most `room` wide together, beside others with these headings."""

    def __init__(
        self, pen: Pen, individuals: Sequence[Mapping[str, Any]], room: int, headings: Sequence[str] = ()
    ) -> None:
        self._pen = pen
        names = all_names(individuals)
        self._names = params_shown(names, headings)
        cells = {name: [pen.text(value(params.get(name, ""))).cell_len for params in individuals] for name in names}
        begins = Counter(name[: _NARROWEST - 1] for name in self._names.values())
        least = {n: cell_len(shown) if begins[shown[: _NARROWEST - 1]] > 1 else 0 for n, shown in self._names.items()}
        whole = {n: max(least[n], min(_WIDEST, max([cell_len(self._names[n]), *cells[n]]))) for n in names}
        self._more = 0
        self._widths = {n: min(whole[n], max([_NARROWEST, least[n], *cells[n]])) for n in names}
        while self._widths and self._width > room:
            self._widths.popitem()
            self._more += 1
        for name, width in self._widths.items():
            self._widths[name] = width + min(whole[name] - width, room - self._width)

    @property
    def heading(self) -> Text:
        """The names, and how many of them are left out."""
        line = self._line({name: self._names[name] for name in self._widths}, "bold")
        return line.append(self._more_text, "bold")

    def row(self, params: Mapping[str, Any]) -> Text:
        """Return the values of one individual as a line."""
        return self._line(params, "")

    @property
    def _more_text(self) -> str:
        return f"{' ' * GAP if self._widths else ''}+{self._more} more" if self._more else ""

    @property
    def _width(self) -> int:
        return sum(self._widths.values()) + GAP * (len(self._widths) - 1) + len(self._more_text)

    def _line(self, values: Mapping[str, Any], style: str) -> Text:
        cells = [
            self._pen.cut(self._pen.text(value(values.get(name, "")), style), width, fill=True)
            for name, width in self._widths.items()
        ]
        return Text(" " * GAP).join(cells)
