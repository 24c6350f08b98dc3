"""Figures of losses: the best beside the runner-up, all in their order, and all over their epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.search_history import find_improvements, sort_by_end
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.store.evaluations import find_best as best_of
from hpo.text_format import format_number
from hpo.views.loss_scale import LossScale, find_complete_losses, make_loss_scale
from hpo.views.page.axes import make_axis
from hpo.views.page.figure import (
    STATE_MARKERS,
    Figure,
    Trace,
    find_island_colour,
    find_island_symbol,
    join_lines,
    make_points,
    sample_evaluations,
)
from hpo.views.page.out_of_range import (
    compute_loss_heights,
    describe_out_of_range,
    format_high_loss,
    make_loss_layout,
    make_loss_markers,
)


def find_runner_up(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Evaluation | None:
    """Return the evaluation with the lowest loss, the winner left out; None where there is none."""
    return next((one for one in rank_evaluations(evaluations, 2) if winner is None or one.trial != winner.trial), None)


def draw_best_and_runner_up(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the losses of the winner and the runner-up after each epoch; None where there are none to draw."""
    shown = (
        ("best", winner, "--accent", "solid"),
        ("runner-up", find_runner_up(evaluations, winner), "--muted", "dot"),
    )
    curves = [one.curve for _, one, _, _ in shown if one is not None]
    if max(map(len, curves), default=0) < 2:
        return None
    losses = [loss for curve in curves for loss in curve.values()]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for name, one, colour, dash in shown:
        if one is not None:
            line = {"color": colour, "width": 2, "dash": dash}
            trace = _draw_curve(one, scale, f"{name}: trial {one.trial}", line)
            far = [(one, epoch) for epoch, loss in one.curve.items() if scale.is_out_of_range(loss)]
            traces += [{**trace, "mode": "lines+markers"}, *_draw_triangles(far, scale, trace["name"], colour)]
    epochs = make_axis("epoch", [max(curve, default=1) for curve in curves], whole=True)
    beyond = describe_out_of_range(losses, scale, "point")
    layout = {"xaxis": epochs, **make_loss_layout(losses, scale)}
    return Figure("best", "The best beside the runner-up", "", traces, layout, height=300, out_of_range_note=beyond)


def _draw_curve(one: Evaluation, scale: LossScale, name: str, line: Mapping[str, Any]) -> Trace:
    """Draw the loss of one evaluation after each epoch."""
    return {
        "x": list(one.curve),
        "y": compute_loss_heights(one.curve.values(), scale),
        "text": [format_number(loss) for loss in one.curve.values()],
        "hovertemplate": "epoch %{x}: loss %{text}",
        "name": name,
        "legendgroup": name,
        "mode": "lines",
        "line": line,
    }


def draw_history(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw each loss in the order in which evaluations ended, by island, and the best so far; None without any."""
    ended = sort_by_end(evaluations)
    if not ended:
        return None
    place = {one.trial: count for count, one in enumerate(ended, start=1)}
    with_loss = [one for one in ended if math.isfinite(one.loss)]
    losses = [one.loss for one in with_loss]
    best_x, best_y = _find_best_so_far(evaluations, ended, place)
    scale = make_loss_scale([*losses, *best_y], find_complete_losses(evaluations))
    shown = sorted(
        sample_evaluations(with_loss), key=lambda one: scale.is_out_of_range(one.loss)
    )  # the legend has the first symbol
    failed = sample_evaluations([one for one in ended if one.state == "failed"])
    traces = []
    for island in sorted({one.island for one in shown}):
        for state, suffix, open_ in (
            ("complete", "", ""),
            ("pruned", ", pruned", "-open"),
            ("paused", ", paused", "-open-dot"),
        ):
            group = [one for one in shown if (one.island, one.state) == (island, state)]
            if group:
                look = {"color": find_island_colour(island), "symbol": find_island_symbol(island) + open_, "size": 7}
                trace = make_points([place[one.trial] for one in group], group, f"island {island}{suffix}")
                traces.append(trace | make_loss_markers([one.loss for one in group], scale, look))
    line = {"color": "--text", "width": 1.5, "shape": "hv"}
    best = {"x": best_x, "y": compute_loss_heights(best_y, scale), "name": "best so far", "mode": "lines", "line": line}
    traces.append({**best, "hoverinfo": "skip"})
    layout = {"xaxis": make_axis("evaluations that have ended"), **make_loss_layout([*losses, *best_y], scale)}
    if failed:  # they have no loss: a strip above the others
        marks = {"color": "--bad", "symbol": "x-thin-open", "size": 8}
        strip = make_points([place[one.trial] for one in failed], failed, "failed")
        traces.append({**strip, "y": [0] * len(failed), "yaxis": "y2", "marker": marks})
        layout["yaxis"]["domain"] = [0, 0.93]
        layout["yaxis2"] = {"domain": [0.96, 1], "visible": False, "fixedrange": True}
    about = "Each point is an evaluation; the line is the best so far."
    return Figure("history", "History", about, traces, layout, out_of_range_note=describe_out_of_range(losses, scale))


def _find_best_so_far(
    evaluations: Sequence[Evaluation], ended: Sequence[Evaluation], place: Mapping[int, int]
) -> tuple[list[int], list[float]]:
    first = best_of(one for one in evaluations if one.imported_from)
    x, y = ([0], [first.loss]) if first else ([], [])
    for one in find_improvements(evaluations):
        x.append(place[one.trial])
        y.append(one.loss)
    if x:
        x.append(len(ended))
        y.append(y[-1])
    return x, y


def draw_learning_curves(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the losses of all evaluations after each epoch, the ends of pruned and failed ones marked."""
    last = [one for one in evaluations if one.state != "promoted"]  # what goes on has the losses until then, too
    with_curve = [one for one in last if len(one.curve) > 1 or (one.curve and one.state != "complete")]
    shown = sample_evaluations(with_curve)
    if not any(len(one.curve) > 1 for one in shown):
        return None
    losses = [loss for one in with_curve for loss in one.curve.values()]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for state, colour, symbol in STATE_MARKERS:
        group = [one for one in shown if one.state == state]
        if group:
            look = {"color": colour, "symbol": symbol, "size": 4 if state == "complete" else 7}
            traces += _draw_group(group, scale, state, look)
    if winner is not None:
        line = {"color": "--accent", "width": 2.5}
        traces.append(_draw_curve(winner, scale, f"best: trial {winner.trial}", line))
    epochs = make_axis("epoch", [max(one.curve) for one in shown], whole=True)
    layout = {"xaxis": epochs, **make_loss_layout(losses, scale)}
    about = "The loss after each epoch of every evaluation. A mark is where it ended, and says which one it was."
    beyond = describe_out_of_range([max(one.curve.values()) for one in with_curve], scale)
    return Figure("curves", "Learning curves", about, traces, layout, height=420, out_of_range_note=beyond)


def _draw_group(group: Sequence[Evaluation], scale: LossScale, name: str, look: Mapping[str, Any]) -> list[Trace]:
    """Draw curves and a mark at the end of each, and a triangle for those that are beyond the scale before that."""
    x, y = join_lines((list(one.curve), compute_loss_heights(one.curve.values(), scale)) for one in group)
    line = {"color": look["color"], "width": 1}
    lines = {"x": x, "y": y, "mode": "lines", "line": line, "opacity": 0.45, "hoverinfo": "skip"}
    ends = [(one, max(one.curve)) for one in group]
    inside = [(one, epoch) for one, epoch in ends if not scale.is_out_of_range(one.curve[epoch])]
    outside = [(one, epoch) for one, epoch in ends if scale.is_out_of_range(one.curve[epoch])]
    highest = [(one, max(one.curve, key=one.curve.__getitem__)) for one, _ in inside]
    far = [(one, epoch) for one, epoch in highest if scale.is_out_of_range(one.curve[epoch])]
    return [
        {**lines, "name": name, "legendgroup": name, "showlegend": False},
        _draw_marks([*inside, *outside], scale, name, look),  # the legend has the first symbol
        *_draw_triangles(far, scale, name, look["color"]),
    ]


def _draw_triangles(places: Sequence[tuple[Evaluation, int]], scale: LossScale, group: str, colour: str) -> list[Trace]:
    """Mark where curves are beyond the scale."""
    marks = _draw_marks(places, scale, group, {"color": colour, "symbol": "", "size": 0})
    return [{**marks, "showlegend": False}] if places else []


def _draw_marks(
    places: Sequence[tuple[Evaluation, int]], scale: LossScale, name: str, look: Mapping[str, Any]
) -> Trace:
    """Mark evaluations at their loss after an epoch; what is beyond the scale says how high it is."""
    losses = [one.curve[epoch] for one, epoch in places]
    trace = make_points([epoch for _, epoch in places], [one for one, _ in places], name)
    highs = [format_high_loss(one.curve[epoch], scale, f" after epoch {epoch}") for one, epoch in places]
    texts = [text + high for text, high in zip(trace["text"], highs, strict=True)]
    return {**trace, **make_loss_markers(losses, scale, look), "text": texts, "legendgroup": name}
