"""Define the parts that all figures share, as data for plotly.js.

A colour that begins with -- is a variable in page.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.text_format import format_number, format_value
from hpo.views.page.axes import escape_markup, round_number

Trace = dict[str, Any]

# Evaluations are drawn by state, in this order, with these colours and symbols.
STATE_MARKERS = (
    ("complete", "--muted", "circle"),
    ("pruned", "--island-1", "triangle-down"),
    ("paused", "--island-4", "diamond"),
    ("promoted", "--island-5", "diamond-open"),
    ("failed", "--bad", "x"),
    ("interrupted", "--island-3", "line-ns-open"),
    ("running", "--island-2", "triangle-right"),
)
MAX_POINTS = 2000  # points that a browser draws as SVG without noticeable delay

# Hyperparameters in the label of a point, because the labels of all points make the file large.
_MAX_LABEL_PARAMS = 12
_ISLAND_COLOURS = 8
_ISLAND_SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up"),
    *("cross", "pentagon", "star", "hexagram"),
)
_SHOW_TEXT = "%{text}<extra></extra>"


@dataclass(frozen=True)
class Figure:
    """A figure of the report."""

    name: str
    """Identifier in the page."""
    title: str
    """Title, which screen readers read aloud."""
    description: str
    """Caption that explains the figure."""
    data: list[Trace]
    """Traces for plotly."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Layout for plotly."""
    height: int = 380
    """Height in pixels."""
    min_width: int = 0
    """Minimum width in pixels."""
    out_of_range_note: str = ""
    """Sentence about the values above the scale; empty if there are none."""


def sample_evaluations(
    evaluations: Sequence[Evaluation], max_count: int = MAX_POINTS
) -> list[Evaluation]:
    """Return at most `max_count` evaluations: half of them the best, and a sample of the others."""
    if len(evaluations) <= max_count:
        return list(evaluations)
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.loss)
    half = max_count // 2
    best = [evaluation for evaluation in ordered[:half] if math.isfinite(evaluation.loss)]
    others = ordered[len(best) :]
    step = math.ceil(len(others) / half)
    return sorted([*best, *others[::step]], key=lambda evaluation: evaluation.trial)


def make_points(x: Sequence[Any], evaluations: Sequence[Evaluation], name: str) -> Trace:
    """Return a trace with a labelled point per evaluation. The caller must add the y values."""
    return {
        "x": list(x),
        "text": [format_label(evaluation) for evaluation in evaluations],
        "hovertemplate": _SHOW_TEXT,
        "name": name,
        "mode": "markers",
    }


def make_line(
    x: Sequence[Any],
    y: Sequence[Any],
    line: Mapping[str, Any],
    texts: Sequence[Any] | None = None,
    **others: Any,
) -> Trace:
    """Return a trace with a line, and with the labels `texts` or none."""
    label = {"hoverinfo": "skip"} if texts is None else {"text": texts, "hovertemplate": _SHOW_TEXT}
    return {"x": x, "y": y, "mode": "lines", "line": line, **label, **others}


def format_label(evaluation: Evaluation) -> str:
    """Return the label of an evaluation's point, with one fact per line."""
    loss = evaluation.state
    if math.isfinite(evaluation.loss):
        loss = f"loss {format_number(evaluation.loss)}"
    params = [f"{name} = {format_value(item)}" for name, item in evaluation.params.items()]
    facts = [
        f"trial {evaluation.trial}: {loss}",
        *params[:_MAX_LABEL_PARAMS],
        f"island {evaluation.island}, worker {evaluation.worker}",
    ]
    return "<br>".join(map(escape_markup, facts))


def find_island_colour(island: int) -> str:
    """Return the colour of an island."""
    return f"--island-{island % _ISLAND_COLOURS}"


def find_island_symbol(island: int) -> str:
    """Return the symbol of an island. Islands with the same colour have different symbols."""
    return _ISLAND_SYMBOLS[island // _ISLAND_COLOURS % len(_ISLAND_SYMBOLS)]


def join_lines(lines: Iterable[tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
    """Return the x and y values of several lines as one line with gaps.

    A browser would need minutes to draw thousands of lines as separate traces.
    """
    x: list[Any] = []
    y: list[Any] = []
    for xs, ys in lines:
        x += [*xs, None]
        y += [*ys, None]
    return x, y


def spread_points(positions: Sequence[int]) -> list[float]:
    """Return positions with small shifts, so that points of a category do not hide each other."""
    # Multiples of the golden ratio, modulo 1, fill an interval evenly.
    golden = (math.sqrt(5) - 1) / 2
    return [
        round(position + (count * golden % 1 - 0.5) * 0.5, 3)
        for count, position in enumerate(positions)
    ]


def round_floats(values: Iterable[Any]) -> list[Any]:
    """Round floats to visible digits, and return other values unchanged."""
    return [round_number(item) if isinstance(item, float) else item for item in values]


def draw_failure_strip(
    x: Sequence[Any], failed: Sequence[Evaluation], layout: dict[str, Any]
) -> list[Trace]:
    """Draw failed evaluations, which have no loss, in a strip above a figure. Adapt its layout."""
    if not failed:
        return []
    layout["yaxis"]["domain"] = [0, 0.93]
    layout["yaxis2"] = {"domain": [0.96, 1], "visible": False, "fixedrange": True}
    marker = {"color": "--bad", "symbol": "x-thin-open", "size": 8}
    points = make_points(x, failed, "failed")
    return [{**points, "y": [0] * len(failed), "yaxis": "y2", "marker": marker}]
