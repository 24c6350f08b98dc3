"""Make figures for plotly's Python package, with the light colours of the report."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.views.page.figure import Figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

# Keys whose values are texts of the run, and never colours.
_TEXT_KEYS = ("text", "ticktext", "name")


def make_plotly_figure(figure: Figure) -> PlotlyFigure:
    """Return a figure as a plotly figure, with a title and a background of its own."""
    from plotly.graph_objects import Figure as PlotlyFigure  # Takes 0.4 s to import.

    back = {"paper_bgcolor": "--back", "plot_bgcolor": "--back", "height": figure.height}
    content = {"data": figure.data, "layout": figure.make_full_layout() | back}
    return PlotlyFigure(_set_colours(content))


def _set_colours(item: Any) -> Any:
    """Return plotly's data with the colours instead of their names, as page.js does."""
    if isinstance(item, str):
        return _read_colours()[item] if item.startswith("--") else item
    if isinstance(item, list):
        return list(map(_set_colours, item))
    if not isinstance(item, dict):
        return item
    return {key: value if key in _TEXT_KEYS else _set_colours(value) for key, value in item.items()}


@cache
def _read_colours() -> dict[str, str]:
    """Return the colours of the style sheet by their names. Its first block is the light theme."""
    light = (Path(__file__).parent / "page.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"(--[\w-]+): (#\w+);", light))
