"""Draw hyperparameters: parallel coordinates, and the loss over each hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.display_names import name_params
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.text_format import format_value
from hpo.views.loss_scale import LossScale, find_complete_losses
from hpo.views.page.figure import (
    EDGE_POSITION,
    MAX_POINTS,
    TRIANGLE_SIZE,
    TRIANGLE_SYMBOL,
    Figure,
    LossAxis,
    Trace,
    UprightAxis,
    draw_failure_strip,
    escape_markup,
    is_log,
    join_lines,
    make_axis,
    make_category_ticks,
    make_line,
    make_points,
    make_upright_axis,
    round_number,
    sample_evaluations,
    shorten_middle,
    spread_points,
    wrap_name,
)

_LINE_HEIGHT = 15  # pixels
_LETTER_WIDTH = 8
_TITLE_WIDTH = 20  # characters per line of a title
_MAX_LEVEL_LABELS = 12  # More labels of categories are written vertically.
_MIN_SLICE_POINTS = 200  # points per slice
_MAX_TOTAL_POINTS = 40_000  # points of all slices
_TICK_LABEL = {
    "showarrow": False,
    "xanchor": "left",
    "xshift": 4,
    "bgcolor": "--veil",
    "borderpad": 1,
    "font": {"size": 11},
}


def draw_parallel_coordinates(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> Figure | None:
    """Draw each complete evaluation as a line across one axis per hyperparameter.

    Return None with fewer than two evaluations or hyperparameters. Plotly's own parallel
    coordinates are not used, because they support no categories, and need WebGL, which many remote
    desktops lack.
    """
    shown = rank_evaluations(sample_evaluations(evaluations), len(evaluations))
    names = [name for name in distributions if any(name in e.params for e in shown)]
    if len(shown) < 2 or len(names) < 2:
        return None
    losses = find_complete_losses(evaluations)
    loss_axis = LossAxis(losses, losses)
    axes = [
        _make_loss_axis(shown, loss_axis.scale),
        *(_make_value_axis(shown, name, distributions[name]) for name in names),
    ]
    headings = ("loss", *name_params(names, ("loss",)).values())
    titles = [wrap_name(name, _TITLE_WIDTH) for name in headings]
    widest = max(len(line) for lines in titles for line in lines)
    tallest = max(len(ticks) for _, ticks in axes)
    description = "Each line is a complete evaluation. A click on the legend hides its lines."
    if any(name not in evaluation.params for evaluation in shown for name in names):
        description += " A line has a gap if a hyperparameter is inactive."
    return Figure(
        "parallel",
        "Parallel coordinates",
        description,
        _draw_bands(shown, axes, loss_axis.scale),
        _make_parallel_layout(axes, titles, loss_axis.scale.is_out_of_range(shown[-1].loss)),
        height=max(420, 100 + _LINE_HEIGHT * tallest),
        min_width=max(90, _LETTER_WIDTH * widest) * len(axes),
        out_of_range_note=loss_axis.describe_out_of_range(losses),
    )


def _draw_bands(
    shown: Sequence[Evaluation], axes: Sequence[UprightAxis], scale: LossScale
) -> list[Trace]:
    """Draw the lines in groups, the best last, and a triangle on each loss out of range."""
    lines = list(zip(*(heights for heights, _ in axes), strict=True))
    positions = list(range(len(axes)))
    traces = []
    count = len(shown)
    best = min(50, max(1, count // 10))
    better = min(300, max(2, count // 2))
    for name, first, last, colour, width in (
        (f"the best {best}", 0, best, "--accent", 2.0),
        (f"the next {better - best}", best, better, "--accent-soft", 1.0),
        ("others", better, count, "--faint", 1.0),
    ):
        if first >= last:
            continue
        far = [e for e in shown[first:last] if scale.is_out_of_range(e.loss)]
        if far:
            marker = {"symbol": TRIANGLE_SYMBOL, "color": "--muted", "size": TRIANGLE_SIZE}
            triangles = make_points([0] * len(far), far, name)
            triangles |= {"y": [EDGE_POSITION] * len(far), "marker": marker}
            traces.append({**triangles, "legendgroup": name, "showlegend": False})
        x, y = join_lines((positions, list(line)) for line in lines[first:last])
        look = {"color": colour, "width": width}
        traces.append(make_line(x, y, look, name=name, legendgroup=name))
    return traces[::-1]


def _make_parallel_layout(
    axes: Sequence[UprightAxis], titles: Sequence[Sequence[str]], has_triangles: bool
) -> dict[str, Any]:
    xaxis = {
        "tickvals": list(range(len(axes))),
        "ticktext": ["<br>".join(lines) for lines in titles],
        "side": "top",
        "range": [-0.1, len(axes) - 0.6],
    }
    top = EDGE_POSITION + 0.03 if has_triangles else 1.03
    annotations = [
        {**_TICK_LABEL, "x": position, "y": height, "text": shorten_middle(text)}
        for position, (_, ticks) in enumerate(axes)
        for height, text in ticks
    ]
    title_height = _LINE_HEIGHT * max(map(len, titles))
    return {
        "xaxis": xaxis,
        "yaxis": {"visible": False, "range": [-0.03, top]},
        "annotations": annotations,
        "margin": {"l": 10, "r": 10, "t": 25 + title_height, "b": 40},
        "legend": {"orientation": "h", "y": 0, "yanchor": "top", "traceorder": "reversed"},
    }


def _make_loss_axis(shown: Sequence[Evaluation], scale: LossScale) -> UprightAxis:
    losses = [min(evaluation.loss, scale.highest) for evaluation in shown]
    heights, ticks = make_upright_axis(losses, None, scale.is_logarithmic)
    for index, evaluation in enumerate(shown):
        if scale.is_out_of_range(evaluation.loss):
            heights[index] = EDGE_POSITION
    return heights, ticks


def _make_value_axis(shown: Sequence[Evaluation], name: str, distribution: Any) -> UprightAxis:
    """Return the axis of a hyperparameter. The height is None if it is inactive."""
    active = [evaluation.params[name] for evaluation in shown if name in evaluation.params]
    heights, ticks = make_upright_axis(active, distribution, is_log(distribution))
    each = iter(heights)
    return [next(each) if name in evaluation.params else None for evaluation in shown], ticks


def draw_slices(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any], order: Sequence[str]
) -> list[Figure]:
    """Draw the loss over each hyperparameter in `order`, in one figure each.

    Later trials have a stronger colour. Failed evaluations are in a strip above the losses.
    """
    with_loss = [e for e in evaluations if e.is_finished and math.isfinite(e.loss)]
    if not with_loss:
        return []
    losses = [evaluation.loss for evaluation in with_loss]
    axis = LossAxis(losses, find_complete_losses(evaluations))
    most = min(MAX_POINTS, max(_MIN_SLICE_POINTS, _MAX_TOTAL_POINTS // max(1, len(order))))
    shown = sample_evaluations(with_loss, most)
    failed = sample_evaluations([e for e in evaluations if e.state == "failed"], most)
    figures = []
    for count, name in enumerate(order):
        distribution = distributions[name]
        traces, layout = _draw_slice([*shown, *failed], name, distribution, axis)
        choices = getattr(distribution, "choices", ())
        height = 280
        width = 0
        if len(choices) > _MAX_LEVEL_LABELS:
            height = 420
            width = _LINE_HEIGHT * len(choices)
            # Plotly's default angle is smaller, and the labels would overlap.
            layout["xaxis"] |= {"tickangle": 90, "tickfont": {"size": 11}, "automargin": True}
        note = axis.describe_out_of_range(losses)
        figures.append(Figure(f"slice-{count}", name, "", traces, layout, height, width, note))
    return figures


def _draw_slice(
    shown: Sequence[Evaluation], name: str, distribution: Any, axis: LossAxis
) -> tuple[list[Trace], dict[str, Any]]:
    active = [evaluation for evaluation in shown if name in evaluation.params]
    failed = [evaluation for evaluation in active if evaluation.state == "failed"]
    active = [evaluation for evaluation in active if evaluation.state != "failed"]
    values = [evaluation.params[name] for evaluation in active]
    losses = [evaluation.loss for evaluation in active]
    marker = {
        "color": [evaluation.trial for evaluation in active],
        "colorscale": [[0, "--faint"], [1, "--accent"]],
        "size": 6,
        "symbol": ["circle" if e.state == "complete" else "circle-open" for e in active],
    }
    points = axis.draw_points(_find_positions(active, name, distribution), active, name, marker)
    points["text"] = [
        escape_markup(f"trial {evaluation.trial}: {name} = {format_value(evaluation.params[name])}")
        + axis.format_high_loss(evaluation.loss)
        for evaluation in active
    ]
    xaxis = make_axis(name, values, log=is_log(distribution))
    xaxis["title"]["text"] = "<br>".join(wrap_name(name, 2 * _TITLE_WIDTH))
    if choices := getattr(distribution, "choices", None):
        xaxis |= make_category_ticks(choices)
    layout = {"xaxis": xaxis, **axis.make_layout(losses), "showlegend": False}
    x = _find_positions(failed, name, distribution)
    return [points, *draw_failure_strip(x, failed, layout)], layout


def _find_positions(evaluations: Sequence[Evaluation], name: str, distribution: Any) -> list[Any]:
    """Return the position of each evaluation on the axis of a hyperparameter that is active."""
    values = [evaluation.params[name] for evaluation in evaluations]
    choices = getattr(distribution, "choices", None)
    if choices:
        return spread_points([choices.index(value) for value in values])
    # Only visible digits.
    return [round_number(value) if isinstance(value, float) else value for value in values]
