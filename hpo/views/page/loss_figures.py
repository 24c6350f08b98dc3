"""Draw losses: the best and the runner-up, all losses in order, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.search_history import find_improvements
from hpo.store.evaluations import Evaluation, find_best, rank_evaluations, sort_by_end
from hpo.text_format import format_number
from hpo.views.loss_scale import LossScale, find_complete_losses, make_loss_scale
from hpo.views.page.axes import make_axis
from hpo.views.page.figure import (
    STATE_MARKERS,
    Figure,
    Trace,
    draw_failure_strip,
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


def find_runner_up(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Evaluation | None:
    """Return the evaluation that has the lowest loss if the winner is left out; None if there is none."""
    return next(
        (
            evaluation
            for evaluation in rank_evaluations(evaluations, 2)
            if winner is None or evaluation.trial != winner.trial
        ),
        None,
    )


def draw_best_and_runner_up(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Figure | None:
    """Draw the losses of the winner and the runner-up after each epoch; None if neither has at least two epochs."""
    shown = (
        ("best", winner, "--accent", "solid"),
        ("runner-up", find_runner_up(evaluations, winner), "--muted", "dot"),
    )
    curves = [evaluation.curve for _, evaluation, _, _ in shown if evaluation is not None]
    if max(map(len, curves), default=0) < 2:
        return None
    losses = [loss for curve in curves for loss in curve.values()]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for name, evaluation, colour, dash in shown:
        if evaluation is not None:
            line = {"color": colour, "width": 2, "dash": dash}
            trace = _draw_curve(evaluation, scale, f"{name}: trial {evaluation.trial}", line)
            far = [
                (evaluation, epoch)
                for epoch, loss in evaluation.curve.items()
                if scale.is_out_of_range(loss)
            ]
            traces += [
                {**trace, "mode": "lines+markers"},
                *_draw_triangles(far, scale, trace["name"], colour),
            ]
    epochs = make_axis("epoch", [max(curve, default=1) for curve in curves], whole=True)
    out_of_range_note = describe_out_of_range(losses, scale, "point")
    layout = {"xaxis": epochs, **make_loss_layout(losses, scale)}
    return Figure(
        "best",
        "The best beside the runner-up",
        "",
        traces,
        layout,
        height=300,
        out_of_range_note=out_of_range_note,
    )


def _draw_curve(
    evaluation: Evaluation, scale: LossScale, name: str, line: Mapping[str, Any]
) -> Trace:
    """Draw the loss of an evaluation after each epoch."""
    return {
        "x": list(evaluation.curve),
        "y": compute_loss_heights(evaluation.curve.values(), scale),
        "text": [format_number(loss) for loss in evaluation.curve.values()],
        "hovertemplate": "epoch %{x}: loss %{text}",
        "name": name,
        "legendgroup": name,
        "mode": "lines",
        "line": line,
    }


def draw_history(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw losses in the order in which evaluations ended, by island, and the best loss so far.

    Return None if no evaluation has ended.
    """
    ended = sort_by_end(evaluations)
    if not ended:
        return None
    order = {evaluation.trial: count for count, evaluation in enumerate(ended, start=1)}
    with_loss = [evaluation for evaluation in ended if math.isfinite(evaluation.loss)]
    losses = [evaluation.loss for evaluation in with_loss]
    best_x, best_y = _find_best_so_far(evaluations, ended, order)
    scale = make_loss_scale([*losses, *best_y], find_complete_losses(evaluations))
    # Triangles come last, because the legend shows the first symbol of a trace.
    shown = sorted(
        sample_evaluations(with_loss), key=lambda evaluation: scale.is_out_of_range(evaluation.loss)
    )
    failed = sample_evaluations(
        [evaluation for evaluation in ended if evaluation.state == "failed"]
    )
    traces = []
    for island in sorted({evaluation.island for evaluation in shown}):
        for state, suffix, open_ in (
            ("complete", "", ""),
            ("pruned", ", pruned", "-open"),
            ("paused", ", paused", "-open-dot"),
        ):
            group = [
                evaluation
                for evaluation in shown
                if (evaluation.island, evaluation.state) == (island, state)
            ]
            if group:
                marker = {
                    "color": find_island_colour(island),
                    "symbol": find_island_symbol(island) + open_,
                    "size": 7,
                }
                trace = make_points(
                    [order[evaluation.trial] for evaluation in group],
                    group,
                    f"island {island}{suffix}",
                )
                traces.append(
                    trace
                    | make_loss_markers([evaluation.loss for evaluation in group], scale, marker)
                )
    line = {"color": "--text", "width": 1.5, "shape": "hv"}
    best = {
        "x": best_x,
        "y": compute_loss_heights(best_y, scale),
        "name": "best so far",
        "mode": "lines",
        "line": line,
    }
    traces.append({**best, "hoverinfo": "skip"})
    layout = {
        "xaxis": make_axis("evaluations that have ended"),
        **make_loss_layout([*losses, *best_y], scale),
    }
    traces += draw_failure_strip([order[evaluation.trial] for evaluation in failed], failed, layout)
    description = "Each point is an evaluation; the line is the best so far."
    return Figure(
        "history",
        "History",
        description,
        traces,
        layout,
        out_of_range_note=describe_out_of_range(losses, scale),
    )


def _find_best_so_far(
    evaluations: Sequence[Evaluation], ended: Sequence[Evaluation], order: Mapping[int, int]
) -> tuple[list[int], list[float]]:
    first = find_best(evaluation for evaluation in evaluations if evaluation.imported_from)
    x, y = ([0], [first.loss]) if first else ([], [])
    for evaluation in find_improvements(evaluations):
        x.append(order[evaluation.trial])
        y.append(evaluation.loss)
    if x:
        x.append(len(ended))
        y.append(y[-1])
    return x, y


def draw_learning_curves(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Figure | None:
    """Draw the loss of each evaluation after each epoch, with a mark at the final epoch.

    Return None if no evaluation has at least two epochs.
    """
    # The trial that continues a promoted one contains its losses.
    last = [evaluation for evaluation in evaluations if evaluation.state != "promoted"]
    with_curve = [
        evaluation
        for evaluation in last
        if len(evaluation.curve) > 1 or (evaluation.curve and evaluation.state != "complete")
    ]
    shown = sample_evaluations(with_curve)
    if not any(len(evaluation.curve) > 1 for evaluation in shown):
        return None
    losses = [loss for evaluation in with_curve for loss in evaluation.curve.values()]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for state, colour, symbol in STATE_MARKERS:
        group = [evaluation for evaluation in shown if evaluation.state == state]
        if group:
            marker = {"color": colour, "symbol": symbol, "size": 4 if state == "complete" else 7}
            traces += _draw_group(group, scale, state, marker)
    if winner is not None:
        line = {"color": "--accent", "width": 2.5}
        traces.append(_draw_curve(winner, scale, f"best: trial {winner.trial}", line))
    epochs = make_axis("epoch", [max(evaluation.curve) for evaluation in shown], whole=True)
    layout = {"xaxis": epochs, **make_loss_layout(losses, scale)}
    description = "The loss after each epoch of every evaluation. A mark shows its end, and names it when the pointer is on it."
    out_of_range_note = describe_out_of_range(
        [max(evaluation.curve.values()) for evaluation in with_curve], scale
    )
    return Figure(
        "curves",
        "Learning curves",
        description,
        traces,
        layout,
        height=420,
        out_of_range_note=out_of_range_note,
    )


def _draw_group(
    group: Sequence[Evaluation], scale: LossScale, name: str, marker: Mapping[str, Any]
) -> list[Trace]:
    """Draw curves with a mark at each final epoch, and a triangle at each highest loss that is out of range."""
    x, y = join_lines(
        (list(evaluation.curve), compute_loss_heights(evaluation.curve.values(), scale))
        for evaluation in group
    )
    line = {"color": marker["color"], "width": 1}
    lines = {"x": x, "y": y, "mode": "lines", "line": line, "opacity": 0.45, "hoverinfo": "skip"}
    ends = [(evaluation, max(evaluation.curve)) for evaluation in group]
    inside = [
        (evaluation, epoch)
        for evaluation, epoch in ends
        if not scale.is_out_of_range(evaluation.curve[epoch])
    ]
    outside = [
        (evaluation, epoch)
        for evaluation, epoch in ends
        if scale.is_out_of_range(evaluation.curve[epoch])
    ]
    highest = [
        (evaluation, max(evaluation.curve, key=evaluation.curve.__getitem__))
        for evaluation, _ in inside
    ]
    far = [
        (evaluation, epoch)
        for evaluation, epoch in highest
        if scale.is_out_of_range(evaluation.curve[epoch])
    ]
    return [
        {**lines, "name": name, "legendgroup": name, "showlegend": False},
        _draw_marks([*inside, *outside], scale, name, marker),  # The legend shows the first symbol.
        *_draw_triangles(far, scale, name, marker["color"]),
    ]


def _draw_triangles(
    points: Sequence[tuple[Evaluation, int]], scale: LossScale, group: str, colour: str
) -> list[Trace]:
    """Draw a triangle at each pair of an evaluation and an epoch whose loss is out of range."""
    marks = _draw_marks(points, scale, group, {"color": colour, "symbol": "", "size": 0})
    return [{**marks, "showlegend": False}] if points else []


def _draw_marks(
    points: Sequence[tuple[Evaluation, int]], scale: LossScale, name: str, marker: Mapping[str, Any]
) -> Trace:
    """Draw a mark at each pair of an evaluation and an epoch. If the loss is out of range, the label contains it."""
    losses = [evaluation.curve[epoch] for evaluation, epoch in points]
    trace = make_points(
        [epoch for _, epoch in points], [evaluation for evaluation, _ in points], name
    )
    highs = [
        format_high_loss(evaluation.curve[epoch], scale, f" after epoch {epoch}")
        for evaluation, epoch in points
    ]
    texts = [text + high for text, high in zip(trace["text"], highs, strict=True)]
    return {**trace, **make_loss_markers(losses, scale, marker), "text": texts, "legendgroup": name}
