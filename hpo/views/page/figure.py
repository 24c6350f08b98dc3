"""What all figures are made of, as plotly.js takes them.

A text that begins with -- is the name of a colour in page.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.text_format import format_number, format_value
from hpo.views.page.axes import escape_markup, round_number

Trace = dict[str, Any]

# The states in which evaluations are drawn, with their colours and symbols.
STATE_MARKERS = (
    ("complete", "--muted", "circle"),
    ("pruned", "--island-1", "triangle-down"),
    ("paused", "--island-4", "diamond"),
    ("promoted", "--island-5", "diamond-open"),
    ("failed", "--bad", "x"),
    ("interrupted", "--island-3", "line-ns-open"),
    ("running", "--island-2", "triangle-right"),
)

_MAX_LABEL_PARAMS = 12  # hyperparameters in the label of a point; each point has a label
_ISLAND_COLOURS = 8
_ISLAND_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star", "hexagram")
MAX_POINTS = 2000  # what a browser draws at once as SVG without being slow


@dataclass(frozen=True)
class Figure:
    """A figure by its `name` in the page: plotly's traces and layout, what it is called, and how to read it.

    `beyond` says how much is beyond its scale, if anything is.
    """

    name: str
    title: str
    description: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 380
    min_width: int = 0
    out_of_range_note: str = ""


def sample_evaluations(evaluations: Sequence[Evaluation], max_count: int = MAX_POINTS) -> list[Evaluation]:
    """Return the evaluations that are drawn: all, or of very many the best, and as many others, taken evenly."""
    if len(evaluations) <= max_count:
        return list(evaluations)
    ordered = sorted(evaluations, key=lambda evaluation: evaluation.loss)
    best = [evaluation for evaluation in ordered[: max_count // 2] if math.isfinite(evaluation.loss)]
    others = ordered[len(best) :]
    step = math.ceil(len(others) / (max_count // 2))
    return sorted([*best, *others[::step]], key=lambda evaluation: evaluation.trial)


def make_points(x: Sequence[Any], evaluations: Sequence[Evaluation], name: str) -> Trace:
    """Return a point for each evaluation, labelled with what it was; the caller has to add their heights."""
    return {
        "x": list(x),
        "text": [format_label(evaluation) for evaluation in evaluations],
        "hovertemplate": "%{text}<extra></extra>",
        "name": name,
        "mode": "markers",
    }


def format_label(evaluation: Evaluation) -> str:
    """Return what an evaluation was, one fact per line."""
    loss = f"loss {format_number(evaluation.loss)}" if math.isfinite(evaluation.loss) else evaluation.state
    params = [f"{name} = {format_value(item)}" for name, item in evaluation.params.items()][:_MAX_LABEL_PARAMS]
    facts = [f"trial {evaluation.trial}: {loss}", *params, f"island {evaluation.island}, worker {evaluation.worker}"]
    return "<br>".join(escape_markup(fact) for fact in facts)


def find_island_colour(island: int) -> str:
    """Return an island's colour."""
    return f"--island-{island % _ISLAND_COLOURS}"


def find_island_symbol(island: int) -> str:
    """Return an island's symbol, which tells it from others of its colour."""
    return _ISLAND_SYMBOLS[island // _ISLAND_COLOURS % len(_ISLAND_SYMBOLS)]


def join_lines(lines: Iterable[tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
    """Return many lines as one, with gaps between them: thousands of traces would take a browser minutes."""
    x: list[Any] = []
    y: list[Any] = []
    for xs, ys in lines:
        x += [*xs, None]
        y += [*ys, None]
    return x, y


def spread_points(positions: Sequence[int]) -> list[float]:
    """Return points around the numbers of their categories, so that they do not hide each other."""
    golden = (math.sqrt(5) - 1) / 2  # steps of it fill an interval evenly
    return [round(position + (count * golden % 1 - 0.5) * 0.5, 3) for count, position in enumerate(positions)]


def round_floats(values: Iterable[Any]) -> list[Any]:
    """Return values, floats with only as many digits as can be seen."""
    return [round_number(item) if isinstance(item, float) else item for item in values]
