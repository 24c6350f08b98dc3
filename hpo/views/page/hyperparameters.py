"""Figures of hyperparameters: all of them at once, and the loss over each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.names import params_shown
from hpo.store.evaluations import Evaluation, rank
from hpo.text import value
from hpo.views.page.axes import axis, fitting, is_log, named_ticks, plain, upright, wrapped
from hpo.views.page.edge import EDGE, TRIANGLE, TRIANGLE_SIZE, loss_layout, marked, said, told
from hpo.views.page.figure import MOST_POINTS, Figure, Trace, drawn, joined, points, shortened, spread
from hpo.views.scale import Scale, complete_losses, scale_of

_LINE, _LETTER = 15, 8  # height and width in pixels
_TITLE_WIDTH = 20  # characters in a line of a title
_MOST_LEVEL = 12  # names of categories that are written level
_LEAST_POINTS, _MOST_IN_ALL = 200, 40_000  # of slices


def parallel_coordinates(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]) -> Figure | None:
    """Draw each complete evaluation as a line over its hyperparameters; None where there are too few of either.

    Plotly's own parallel coordinates need WebGL, which many remote desktops do not have, and show no categories.
    """
    shown = rank(drawn(evaluations), len(evaluations))
    names = [name for name in distributions if any(name in one.params for one in shown)]
    if len(shown) < 2 or len(names) < 2:
        return None
    losses = complete_losses(evaluations)
    scale = scale_of(losses, losses)
    axes = [_losses(shown, scale), *(_values(shown, name, distributions[name]) for name in names)]
    lines = list(zip(*(heights for heights, _ in axes), strict=True))
    places = list(range(len(axes)))
    traces = []
    for name, first, last, colour, width in _bands(len(shown)):
        x, y = joined((places, list(line)) for line in lines[first:last])
        line = {"color": colour, "width": width}
        trace = {"x": x, "y": y, "name": name, "mode": "lines", "line": line, "hoverinfo": "skip", "legendgroup": name}
        far = [one for one in shown[first:last] if scale.beyond(one.loss)]
        traces += [*_triangles(far, name), trace]
    titles = [wrapped(name, _TITLE_WIDTH) for name in ("loss", *params_shown(names, ("loss",)).values())]
    widest = max(max(map(len, lines)) for lines in titles)
    tallest = max(len(ticks) for _, ticks in axes)
    labels = {"showarrow": False, "xanchor": "left", "xshift": 4, "bgcolor": "--veil", "borderpad": 1}
    layout = {
        "xaxis": {
            "tickvals": places,
            "ticktext": ["<br>".join(lines) for lines in titles],
            "side": "top",
            "range": [-0.1, len(axes) - 0.6],
        },
        "yaxis": {"visible": False, "range": [-0.03, EDGE + 0.03 if scale.beyond(shown[-1].loss) else 1.03]},
        "annotations": [
            {**labels, "x": place, "y": height, "text": fitting(text), "font": {"size": 11}}
            for place, (_, ticks) in enumerate(axes)
            for height, text in ticks
        ],
        "margin": {"l": 10, "r": 10, "t": 25 + _LINE * max(map(len, titles)), "b": 40},
        "legend": {"orientation": "h", "y": 0, "yanchor": "top", "traceorder": "reversed"},
    }
    about = "Each line is a complete evaluation. A click on the legend hides its lines."
    if any(name not in one.params for one in shown for name in names):
        about += " A line has a gap where a hyperparameter does not exist."
    beyond = told(losses, scale)
    height, width = max(420, 100 + _LINE * tallest), max(90, _LETTER * widest) * len(axes)
    return Figure("parallel", "Parallel coordinates", about, traces[::-1], layout, height, width, beyond)


def _losses(shown: Sequence[Evaluation], scale: Scale) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the heights of losses on their upright axis, and its ticks."""
    heights, ticks = upright([min(one.loss, scale.highest) for one in shown], None, log=scale.logarithmic)
    return [EDGE if scale.beyond(one.loss) else at for one, at in zip(shown, heights, strict=True)], ticks


def _values(
    shown: Sequence[Evaluation], name: str, distribution: Any
) -> tuple[list[float | None], list[tuple[float, str]]]:
    """Return the heights of a hyperparameter's values on its upright axis, None where it does not exist, and ticks."""
    having = [one.params[name] for one in shown if name in one.params]
    heights, ticks = upright(having, distribution, log=is_log(distribution))
    each = iter(heights)
    return [next(each) if name in one.params else None for one in shown], ticks


def _triangles(far: Sequence[Evaluation], group: str) -> list[Trace]:
    """Mark lines that begin beyond the scale of losses."""
    look = {"symbol": TRIANGLE, "color": "--muted", "size": TRIANGLE_SIZE}
    triangles = {**points([0] * len(far), far, group), "y": [EDGE] * len(far), "marker": look}
    return [{**triangles, "legendgroup": group, "showlegend": False}] if far else []


def _bands(count: int) -> list[tuple[str, int, int, str, float]]:
    """Return bands of places: for each a name, the first place, the one behind the last, a colour and a width."""
    best, better = min(50, max(1, count // 10)), min(300, max(2, count // 2))
    bands = [
        (f"the best {best}", 0, best, "--accent", 2.0),
        (f"the next {better - best}", best, better, "--accent-soft", 1.0),
        ("others", better, count, "--faint", 1.0),
    ]
    return [band for band in bands if band[1] < band[2]]


def slices(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any], order: Sequence[str]) -> list[Figure]:
    """Draw the loss over each hyperparameter, in the order given; later evaluations have a stronger colour."""
    most = min(MOST_POINTS, max(_LEAST_POINTS, _MOST_IN_ALL // max(1, len(order))))
    with_loss = [one for one in evaluations if one.finished and math.isfinite(one.loss)]
    if not with_loss:
        return []
    scale = scale_of([one.loss for one in with_loss], complete_losses(evaluations))
    beyond = told([one.loss for one in with_loss], scale)
    shown = drawn(with_loss, most)
    figures = []
    for count, name in enumerate(order):
        having = [one for one in shown if name in one.params]
        trace, layout = _slice(having, name, distributions[name], scale)
        choices = getattr(distributions[name], "choices", ())
        is_long = len(choices) > _MOST_LEVEL
        width, height = (_LINE * len(choices), 420) if is_long else (0, 280)
        if is_long:  # plotly would turn them by less, so that they overlap
            layout["xaxis"] |= {"tickangle": 90, "tickfont": {"size": 11}, "automargin": True}
        figures.append(Figure(f"slice-{count}", name, "", [trace], layout, height, width, beyond))
    return figures


def _slice(shown: Sequence[Evaluation], name: str, distribution: Any, scale: Scale) -> tuple[Trace, dict[str, Any]]:
    """Return the points and the layout of the losses of some evaluations over one hyperparameter, which they have."""
    losses, values = [one.loss for one in shown], [one.params[name] for one in shown]
    look = {
        "color": [one.trial for one in shown],
        "colorscale": [[0, "--faint"], [1, "--accent"]],
        "size": 6,
        "symbol": ["circle" if one.state == "complete" else "circle-open" for one in shown],
    }
    choices = getattr(distribution, "choices", None)
    places = spread([choices.index(item) for item in values]) if choices else shortened(values)
    trace = points(places, shown, name) | marked(losses, scale, look)
    texts = [plain(f"trial {one.trial}: {name} = {value(one.params[name])}") for one in shown]
    trace["text"] = [text + said(loss, scale) for text, loss in zip(texts, losses, strict=True)]
    xaxis = axis(name, values, log=is_log(distribution))
    xaxis["title"]["text"] = "<br>".join(wrapped(name, 2 * _TITLE_WIDTH))
    if choices:
        xaxis |= named_ticks(choices)
    return trace, {"xaxis": xaxis, **loss_layout(losses, scale), "showlegend": False}
