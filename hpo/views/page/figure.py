"""Define the parts that all figures share, as data for plotly.js.

They are axes, points, lines and labels. A colour that begins with -- is a variable in page.css. A
loss above the scale of an axis is drawn as a triangle at the upper edge, and counted.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.text_format import cut_text, format_count, format_number, format_value
from hpo.views.loss_scale import LossScale, make_loss_scale

_MAX_WHOLE_TICKS = 6
_LONGEST_TICK = 24  # characters
_LARGEST_POWER = 308  # largest exponent of ten of a float

UprightAxis = tuple[list[Any], list[tuple[float, str]]]
"""Heights of all values on a vertical axis from 0 to 1, and of all ticks, each with its text."""
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
EDGE_POSITION = 1.08  # position of the triangles; the scale is from 0 to 1
TRIANGLE_SYMBOL = "triangle-up"
TRIANGLE_SIZE = 9
_SEPARATOR_POSITION = 1.04
_AXIS_END = 1.12
_AXIS_START = -0.06


def is_log(distribution: Any) -> bool:
    """Return whether a hyperparameter is searched on a logarithmic scale."""
    return bool(getattr(distribution, "log", False))


def make_axis(
    title: str, values: Sequence[float] = (), *, log: bool = False, whole: bool = False
) -> dict[str, Any]:
    """Return a plotly axis. If it is logarithmic or has whole numbers, it needs the values."""
    axis: dict[str, Any] = {"title": {"text": escape_markup(title)}, "zeroline": False}
    if log and values:
        ticks = _compute_log_ticks(min(values), max(values))
        axis |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    if whole:
        steps = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
        axis["dtick"] = next(step for step in steps if max(values) <= 10 * step)
    return axis


def wrap_name(text: str, width: int) -> list[str]:
    """Split a name, after underscores if possible, into lines of `width`, escaped for plotly."""
    lines = [""]
    for part in re.findall(r"[^_]*_+|[^_]+", cut_text(text, 80)):
        for start in range(0, len(part), width):
            piece = part[start : start + width]
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return [escape_markup(line) for line in lines]


def shorten_middle(text: str) -> str:
    """Replace the middle of a long text by an ellipsis, and escape the text for plotly."""
    half = _LONGEST_TICK // 2
    if len(text) > _LONGEST_TICK:
        text = f"{text[:half]}\N{HORIZONTAL ELLIPSIS}{text[-half:]}"
    return escape_markup(text)


def make_category_ticks(choices: Sequence[Any]) -> dict[str, Any]:
    """Return the ticks of an axis on which the choices are at 0, 1, 2 and so on."""
    return {
        "tickvals": list(range(len(choices))),
        "ticktext": [shorten_middle(format_value(item)) for item in choices],
    }


def make_upright_axis(values: Sequence[Any], distribution: Any, log: bool) -> UprightAxis:
    """Return the heights of all values on a vertical axis, and its ticks."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        span = max(1, len(choices) - 1)
        heights = {choice: index / span for index, choice in enumerate(choices)}
        labels = [(heights[choice], format_value(choice)) for choice in choices]
        return [heights[item] for item in values], labels
    low = min(values)
    high = max(values)

    def compute_height(item: float) -> float:
        if low == high:
            return 0.5
        if log:
            length = math.log10(high) - math.log10(low)
            return round((math.log10(item) - math.log10(low)) / length, 4)
        # Halves, because a difference may overflow.
        return round(float((item / 2 - low / 2) / (high / 2 - low / 2)), 4)

    def format_tick(tick: float) -> str:
        return f"{tick:g}" if log and tick not in (low, high) else format_value(tick)

    ticks = [low, (low + high) / 2, high]
    if log:
        ticks = [low, *_compute_log_ticks(low, high, margin=0.06), high]
    elif isinstance(low, int) and high - low < _MAX_WHOLE_TICKS:
        ticks = list(range(low, high + 1))
    labels = [(compute_height(tick), format_tick(tick)) for tick in dict.fromkeys(ticks)]
    return [compute_height(item) for item in values], labels


def _compute_log_ticks(low: float, high: float, margin: float = 0.0) -> list[float]:
    """Return powers of ten between `low` and `high`, and also 2 and 5 times these if they are few.

    Ticks within `margin` of either end, a fraction of the axis, are left out.
    """
    least = math.log10(low)
    most = math.log10(high)
    gap = (most - least) * margin
    powers = range(math.floor(least), math.ceil(most) + 1)
    steps = (1, 2, 5) if len(powers) < 5 else (1,)
    every = max(1, len(powers) // 12)
    ticks = []
    for power in powers[::every]:
        for step in steps:
            tick = step * 10.0**power if power < _LARGEST_POWER else math.inf
            if tick > 0 and least + gap <= math.log10(tick) <= most - gap:
                ticks.append(tick)
    return ticks


def compute_linear_ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers between `low` and `high`, which may be equal."""
    if low == high:
        return [low]
    least = max(high / 8 - low / 8, sys.float_info.min)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= least)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def escape_markup(text: str) -> str:
    """Escape < and &, because plotly reads them as markup, and cut the text to 80 characters."""
    return cut_text(text, 80).replace("&", "&amp;").replace("<", "&lt;")


def round_number(item: float, digits: int = 6) -> float:
    """Round a number to significant digits. More are seldom visible, and would enlarge the file."""
    return float(f"{item:.{digits}g}")


@dataclass(frozen=True)
class Figure:
    """A figure of the report: traces and a layout for plotly. Lengths are in pixels."""

    name: str
    """Identifier in the page."""
    title: str
    """Title, which screen readers read aloud."""
    description: str
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 380
    min_width: int = 0
    out_of_range_note: str = ""
    """Sentence about the values above the scale; empty if there are none."""

    def make_full_layout(self) -> dict[str, Any]:
        """Return the layout of the figure, with what the layouts of all figures have in common."""
        line = {"gridcolor": "--grid", "linecolor": "--grid", "automargin": True}
        return {
            "margin": {"l": 55, "r": 10, "t": 10, "b": 45},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 13, "color": "--text"},
            "hovermode": "closest",
            "hoverlabel": {"align": "left", "bgcolor": "--card", "font": {"color": "--text"}},
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
            **self.layout,
            "xaxis": {**line, **self.layout.get("xaxis", {})},
            "yaxis": {**line, **self.layout.get("yaxis", {})},
        }


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


class LossAxis:
    """Vertical axis of a figure of losses, with a scale for those below the triangles.

    The usual losses determine which losses are out of range (`make_loss_scale`).
    """

    def __init__(self, losses: Sequence[float], usual_losses: Sequence[float]) -> None:
        self.scale = make_loss_scale(losses, usual_losses)

    def make_layout(self, losses: Iterable[float]) -> dict[str, Any]:
        """Return the layout of an axis for `losses`, with a dotted line below triangles."""
        is_cut = any(map(self.scale.is_out_of_range, losses))
        layout: dict[str, Any] = {"yaxis": make_cut_axis("loss", self.scale, is_cut)}
        if is_cut:
            layout["shapes"] = [make_separator("y", self.scale)]
        return layout

    def compute_heights(self, losses: Iterable[float]) -> list[float]:
        """Return the value at which each loss is drawn."""
        return compute_heights(losses, self.scale)

    def draw_points(
        self,
        x: Sequence[Any],
        evaluations: Sequence[Evaluation],
        name: str,
        marker: Mapping[str, Any],
        losses: Sequence[float] | None = None,
    ) -> Trace:
        """Draw a labelled point per evaluation, at `losses` or by default at its own loss."""
        if losses is None:
            losses = [evaluation.loss for evaluation in evaluations]
        marker = dict(marker)
        is_far = [self.scale.is_out_of_range(loss) for loss in losses]
        if any(is_far):
            symbol = marker["symbol"]
            symbols = [symbol] * len(losses) if isinstance(symbol, str) else symbol
            # The triangle is open (not filled) if the symbol that it replaces is open.
            marker["symbol"] = [
                TRIANGLE_SYMBOL + "-open" * ("-open" in own) if far else own
                for far, own in zip(is_far, symbols, strict=True)
            ]
            marker["size"] = [TRIANGLE_SIZE if far else marker["size"] for far in is_far]
            # Plotly would draw points of different sizes as bubbles.
            marker |= {"opacity": 1, "line": {"width": 0}}
        return {
            **make_points(x, evaluations, name),
            "y": self.compute_heights(losses),
            "marker": marker,
        }

    def format_high_loss(self, loss: float, more: str = "") -> str:
        """Return a line with the loss and `more` for the label of a point; "" if it is in range."""
        return f"<br>loss {format_number(loss)}{more}" if self.scale.is_out_of_range(loss) else ""

    def describe_out_of_range(self, losses: Iterable[float], noun: str = "evaluation") -> str:
        """Return a sentence with the number of out-of-range losses, as `noun`s; "" without any."""
        far = [loss for loss in losses if self.scale.is_out_of_range(loss)]
        if not far:
            return ""
        verb, highest = ("goes", "a loss of") if len(far) == 1 else ("go", "losses of up to")
        where = "\N{BLACK UP-POINTING TRIANGLE} at the upper edge"
        return (
            f"{format_count(len(far), noun)} {verb} beyond the scale, "
            f"with {highest} {format_number(max(far))}: {where}."
        )


def make_cut_axis(title: str, scale: LossScale, is_cut: bool) -> dict[str, Any]:
    """Return a plotly axis; if `is_cut`, with space beyond the scale for out-of-range values."""
    axis = make_axis(title, [scale.lowest, scale.highest], log=scale.is_logarithmic)
    if not is_cut:
        return axis
    ends = [scale.compute_loss(fraction) for fraction in (_AXIS_START, _AXIS_END)]
    if scale.is_logarithmic:
        return axis | {"range": [math.log10(end) for end in ends]}
    # Plotly's own ticks would extend to the edge.
    ticks = compute_linear_ticks(scale.lowest, scale.highest)
    return axis | {"tickvals": ticks, "ticktext": [f"{tick:.8g}" for tick in ticks], "range": ends}


def make_separator(along: str, scale: LossScale) -> dict[str, Any]:
    """Return a dotted line across axis `along` ("x" or "y"), between scale and triangles."""
    across = "y" if along == "x" else "x"
    value = scale.compute_loss(_SEPARATOR_POSITION)
    return {
        "type": "line",
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        f"{along}0": value,
        f"{along}1": value,
        "line": {"color": "--muted", "width": 1, "dash": "dot"},
        "layer": "below",
    }


def compute_heights(losses: Iterable[float], scale: LossScale) -> list[float]:
    """Return the value at which each loss is drawn: just above the scale if it is out of range."""
    largest = max(abs(scale.lowest), abs(scale.highest))
    length = scale.highest / 2 - scale.lowest / 2
    digits = 6
    if length and largest > 2 * length:
        digits = min(17, 6 + math.floor(math.log10(largest / length / 2)))
    edge = scale.compute_loss(EDGE_POSITION)
    return [round_number(edge if scale.is_out_of_range(loss) else loss, digits) for loss in losses]
