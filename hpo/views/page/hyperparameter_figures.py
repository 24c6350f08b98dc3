"""Draw hyperparameters: parallel coordinates, and the loss over each hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.display_names import name_params
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.text_format import format_value
from hpo.views.loss_scale import LossScale, find_complete_losses, make_loss_scale
from hpo.views.page.axes import (
    escape_markup,
    is_log,
    make_axis,
    make_category_ticks,
    make_upright_axis,
    shorten_middle,
    wrap_name,
)
from hpo.views.page.figure import (
    MAX_POINTS,
    Figure,
    Trace,
    draw_failure_strip,
    join_lines,
    make_points,
    round_floats,
    sample_evaluations,
    spread_points,
)
from hpo.views.page.out_of_range import (
    EDGE_POSITION,
    TRIANGLE_SIZE,
    TRIANGLE_SYMBOL,
    describe_out_of_range,
    format_high_loss,
    make_loss_layout,
    make_loss_markers,
)

_LINE_HEIGHT, _LETTER_WIDTH = 15, 8  # pixels
_TITLE_WIDTH = 20  # characters per line of a title
_MAX_LEVEL_LABELS = 12  # More labels of categories are written vertically.
_MIN_SLICE_POINTS, _MAX_TOTAL_POINTS = 200, 40_000  # points per slice, points of all slices


def draw_parallel_coordinates(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> Figure | None:
    """Draw parallel coordinates, in which each complete evaluation is a line across one axis per hyperparameter.

    Return None with fewer than two evaluations or hyperparameters. Plotly's own parallel
    coordinates are not used, because they support no categories, and need WebGL, which many remote
    desktops lack.
    """
    shown = rank_evaluations(sample_evaluations(evaluations), len(evaluations))
    names = [
        name for name in distributions if any(name in evaluation.params for evaluation in shown)
    ]
    if len(shown) < 2 or len(names) < 2:
        return None
    losses = find_complete_losses(evaluations)
    scale = make_loss_scale(losses, losses)
    axes = [
        _make_loss_axis(shown, scale),
        *(_make_value_axis(shown, name, distributions[name]) for name in names),
    ]
    lines = list(zip(*(heights for heights, _ in axes), strict=True))
    positions = list(range(len(axes)))
    traces = []
    for name, first, last, colour, width in _make_bands(len(shown)):
        x, y = join_lines((positions, list(line)) for line in lines[first:last])
        line = {"color": colour, "width": width}
        trace = {
            "x": x,
            "y": y,
            "name": name,
            "mode": "lines",
            "line": line,
            "hoverinfo": "skip",
            "legendgroup": name,
        }
        far = [
            evaluation for evaluation in shown[first:last] if scale.is_out_of_range(evaluation.loss)
        ]
        traces += [*_draw_triangles(far, name), trace]
    titles = [
        wrap_name(name, _TITLE_WIDTH) for name in ("loss", *name_params(names, ("loss",)).values())
    ]
    widest = max(max(map(len, lines)) for lines in titles)
    tallest = max(len(ticks) for _, ticks in axes)
    labels = {
        "showarrow": False,
        "xanchor": "left",
        "xshift": 4,
        "bgcolor": "--veil",
        "borderpad": 1,
    }
    layout = {
        "xaxis": {
            "tickvals": positions,
            "ticktext": ["<br>".join(lines) for lines in titles],
            "side": "top",
            "range": [-0.1, len(axes) - 0.6],
        },
        "yaxis": {
            "visible": False,
            "range": [
                -0.03,
                EDGE_POSITION + 0.03 if scale.is_out_of_range(shown[-1].loss) else 1.03,
            ],
        },
        "annotations": [
            {
                **labels,
                "x": position,
                "y": height,
                "text": shorten_middle(text),
                "font": {"size": 11},
            }
            for position, (_, ticks) in enumerate(axes)
            for height, text in ticks
        ],
        "margin": {"l": 10, "r": 10, "t": 25 + _LINE_HEIGHT * max(map(len, titles)), "b": 40},
        "legend": {"orientation": "h", "y": 0, "yanchor": "top", "traceorder": "reversed"},
    }
    description = "Each line is a complete evaluation. A click on the legend hides its lines."
    if any(name not in evaluation.params for evaluation in shown for name in names):
        description += " A line has a gap if a hyperparameter is inactive."
    out_of_range_note = describe_out_of_range(losses, scale)
    height, width = (
        max(420, 100 + _LINE_HEIGHT * tallest),
        max(90, _LETTER_WIDTH * widest) * len(axes),
    )
    return Figure(
        "parallel",
        "Parallel coordinates",
        description,
        traces[::-1],
        layout,
        height,
        width,
        out_of_range_note,
    )


def _make_loss_axis(
    shown: Sequence[Evaluation], scale: LossScale
) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the position of each loss on a vertical axis, and the ticks of this axis."""
    heights, ticks = make_upright_axis(
        [min(evaluation.loss, scale.highest) for evaluation in shown],
        None,
        log=scale.is_logarithmic,
    )
    return [
        EDGE_POSITION if scale.is_out_of_range(evaluation.loss) else at
        for evaluation, at in zip(shown, heights, strict=True)
    ], ticks


def _make_value_axis(
    shown: Sequence[Evaluation], name: str, distribution: Any
) -> tuple[list[float | None], list[tuple[float, str]]]:
    """Return the position of each value of a hyperparameter on a vertical axis, and the ticks of this axis.

    The position is None for an evaluation in which the hyperparameter is inactive.
    """
    having = [evaluation.params[name] for evaluation in shown if name in evaluation.params]
    heights, ticks = make_upright_axis(having, distribution, log=is_log(distribution))
    each = iter(heights)
    return [next(each) if name in evaluation.params else None for evaluation in shown], ticks


def _draw_triangles(far: Sequence[Evaluation], group: str) -> list[Trace]:
    """Draw a triangle on each line whose loss is out of range."""
    marker = {"symbol": TRIANGLE_SYMBOL, "color": "--muted", "size": TRIANGLE_SIZE}
    triangles = {
        **make_points([0] * len(far), far, group),
        "y": [EDGE_POSITION] * len(far),
        "marker": marker,
    }
    return [{**triangles, "legendgroup": group, "showlegend": False}] if far else []


def _make_bands(count: int) -> list[tuple[str, int, int, str, float]]:
    """Return groups of lines, the best losses first. Each has a name, first index, end index, colour and width."""
    best, better = min(50, max(1, count // 10)), min(300, max(2, count // 2))
    bands = [
        (f"the best {best}", 0, best, "--accent", 2.0),
        (f"the next {better - best}", best, better, "--accent-soft", 1.0),
        ("others", better, count, "--faint", 1.0),
    ]
    return [band for band in bands if band[1] < band[2]]


def draw_slices(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any], order: Sequence[str]
) -> list[Figure]:
    """Draw the loss over each hyperparameter in `order`, in one figure each. Later trials have a stronger colour.

    Failed evaluations are in a strip above the losses.
    """
    most = min(MAX_POINTS, max(_MIN_SLICE_POINTS, _MAX_TOTAL_POINTS // max(1, len(order))))
    with_loss = [
        evaluation
        for evaluation in evaluations
        if evaluation.is_finished and math.isfinite(evaluation.loss)
    ]
    if not with_loss:
        return []
    scale = make_loss_scale(
        [evaluation.loss for evaluation in with_loss], find_complete_losses(evaluations)
    )
    out_of_range_note = describe_out_of_range([evaluation.loss for evaluation in with_loss], scale)
    shown = sample_evaluations(with_loss, most)
    failed = sample_evaluations(
        [evaluation for evaluation in evaluations if evaluation.state == "failed"], most
    )
    figures = []
    for count, name in enumerate(order):
        having = [evaluation for evaluation in shown if name in evaluation.params]
        trace, layout = _draw_slice(having, name, distributions[name], scale)
        failed_here = [evaluation for evaluation in failed if name in evaluation.params]
        strip = draw_failure_strip(
            _find_positions(failed_here, name, distributions[name]), failed_here, layout
        )
        choices = getattr(distributions[name], "choices", ())
        is_long = len(choices) > _MAX_LEVEL_LABELS
        width, height = (_LINE_HEIGHT * len(choices), 420) if is_long else (0, 280)
        if is_long:  # Plotly's default angle is smaller, and the labels would overlap.
            layout["xaxis"] |= {"tickangle": 90, "tickfont": {"size": 11}, "automargin": True}
        figures.append(
            Figure(
                f"slice-{count}",
                name,
                "",
                [trace, *strip],
                layout,
                height,
                width,
                out_of_range_note,
            )
        )
    return figures


def _draw_slice(
    shown: Sequence[Evaluation], name: str, distribution: Any, scale: LossScale
) -> tuple[Trace, dict[str, Any]]:
    """Return the points and the layout of the loss over one hyperparameter, which is active in all `shown`."""
    losses, values = (
        [evaluation.loss for evaluation in shown],
        [evaluation.params[name] for evaluation in shown],
    )
    marker = {
        "color": [evaluation.trial for evaluation in shown],
        "colorscale": [[0, "--faint"], [1, "--accent"]],
        "size": 6,
        "symbol": [
            "circle" if evaluation.state == "complete" else "circle-open" for evaluation in shown
        ],
    }
    trace = make_points(
        _find_positions(shown, name, distribution), shown, name
    ) | make_loss_markers(losses, scale, marker)
    texts = [
        escape_markup(f"trial {evaluation.trial}: {name} = {format_value(evaluation.params[name])}")
        for evaluation in shown
    ]
    trace["text"] = [
        text + format_high_loss(loss, scale) for text, loss in zip(texts, losses, strict=True)
    ]
    xaxis = make_axis(name, values, log=is_log(distribution))
    xaxis["title"]["text"] = "<br>".join(wrap_name(name, 2 * _TITLE_WIDTH))
    if choices := getattr(distribution, "choices", None):
        xaxis |= make_category_ticks(choices)
    return trace, {"xaxis": xaxis, **make_loss_layout(losses, scale), "showlegend": False}


def _find_positions(shown: Sequence[Evaluation], name: str, distribution: Any) -> list[Any]:
    """Return the position of each evaluation on the axis of a hyperparameter, which is active in all of them."""
    values = [evaluation.params[name] for evaluation in shown]
    choices = getattr(distribution, "choices", None)
    return (
        spread_points([choices.index(item) for item in values]) if choices else round_floats(values)
    )
