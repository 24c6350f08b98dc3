"""Draw losses: the best and the runner-up, losses in order, learning curves, and rungs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.objectives import Objectives
from hpo.results.search_history import find_improvements
from hpo.store.evaluations import (
    Evaluation,
    find_best,
    group_by_individual,
    rank_evaluations,
    sort_by_end,
)
from hpo.store.pruning import HALVING_SCHEDULES, Rung, compute_rungs
from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import find_complete_losses
from hpo.views.page.axes import make_axis
from hpo.views.page.figure import (
    MAX_POINTS,
    STATE_MARKERS,
    Figure,
    Trace,
    draw_failure_strip,
    find_island_colour,
    find_island_symbol,
    join_lines,
    make_line,
    sample_evaluations,
    spread_points,
)
from hpo.views.page.loss_axis import LossAxis

Point = tuple[Evaluation, int]
"""An evaluation, and the epoch of one of its losses."""

# States of evaluations in the history, each with the ends of its name and of its symbol.
_HISTORY_STATES = (
    ("complete", "", ""),
    ("pruned", ", pruned", "-open"),
    ("paused", ", paused", "-open-dot"),
)
# Outcomes of individuals at a rung, with colours and symbols.
_OUTCOMES = (
    ("continued", "--good", "circle"),
    ("promoted later", "--accent", "star"),
    ("paused", "--island-4", "diamond-open"),
    ("pruned", "--muted", "triangle-down-open"),
    ("failed", "--bad", "x"),
)


def find_runner_up(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Evaluation | None:
    """Return the evaluation with the lowest loss apart from the winner; None if there is none."""
    best = rank_evaluations(evaluations, 2)
    others = (e for e in best if winner is None or e.trial != winner.trial)
    return next(others, None)


def draw_best_and_runner_up(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Figure | None:
    """Draw the losses of the winner and the runner-up; None if neither has two epochs."""
    candidates = (
        ("best", winner, "--accent", "solid"),
        ("runner-up", find_runner_up(evaluations, winner), "--muted", "dot"),
    )
    curves = [evaluation.curve for _, evaluation, _, _ in candidates if evaluation is not None]
    if max(map(len, curves), default=0) < 2:
        return None
    losses = [loss for curve in curves for loss in curve.values()]
    axis = LossAxis(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for role, evaluation, colour, dash in candidates:
        if evaluation is not None:
            name = f"{role}: trial {evaluation.trial}"
            line = {"color": colour, "width": 2, "dash": dash}
            traces.append({**_draw_curve(evaluation, axis, name, line), "mode": "lines+markers"})
            points = [(evaluation, epoch) for epoch in evaluation.curve]
            traces += _draw_triangles(points, axis, name, colour)
    epochs = make_axis("epoch", [max(curve, default=1) for curve in curves], whole=True)
    layout = {"xaxis": epochs, **axis.make_layout(losses)}
    return Figure(
        "best",
        "The best beside the runner-up",
        "",
        traces,
        layout,
        height=300,
        out_of_range_note=axis.describe_out_of_range(losses, "point"),
    )


def _draw_curve(
    evaluation: Evaluation, axis: LossAxis, name: str, line: Mapping[str, Any]
) -> Trace:
    """Draw the loss of an evaluation after each epoch."""
    losses = list(evaluation.curve.values())
    heights = axis.compute_heights(losses)
    trace = make_line(list(evaluation.curve), heights, line, list(map(format_number, losses)))
    hover = "epoch %{x}: loss %{text}"
    return {**trace, "hovertemplate": hover, "name": name, "legendgroup": name}


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
    best_x, best_y = _find_best_so_far(evaluations, order)
    axis = LossAxis([*losses, *best_y], find_complete_losses(evaluations))
    traces = _draw_islands(sample_evaluations(with_loss), order, axis)
    line = {"color": "--text", "width": 1.5, "shape": "hv"}
    traces.append(make_line(best_x, axis.compute_heights(best_y), line, name="best so far"))
    layout = {
        "xaxis": make_axis("evaluations that have ended"),
        **axis.make_layout([*losses, *best_y]),
    }
    failed = sample_evaluations([e for e in ended if e.state == "failed"])
    traces += draw_failure_strip([order[e.trial] for e in failed], failed, layout)
    description = "Each point is an evaluation; the line is the best so far."
    note = axis.describe_out_of_range(losses)
    return Figure("history", "History", description, traces, layout, out_of_range_note=note)


def _draw_islands(
    shown: Sequence[Evaluation], order: Mapping[int, int], axis: LossAxis
) -> list[Trace]:
    """Draw a point per evaluation, in a trace per island and state."""
    # Triangles come last, because the legend shows the first symbol of a trace.
    shown = sorted(shown, key=lambda evaluation: axis.scale.is_out_of_range(evaluation.loss))
    traces = []
    for island in sorted({evaluation.island for evaluation in shown}):
        for state, name_end, symbol_end in _HISTORY_STATES:
            group = [e for e in shown if (e.island, e.state) == (island, state)]
            if not group:
                continue
            symbol = find_island_symbol(island) + symbol_end
            marker = {"color": find_island_colour(island), "symbol": symbol, "size": 7}
            x = [order[evaluation.trial] for evaluation in group]
            traces.append(axis.draw_points(x, group, f"island {island}{name_end}", marker))
    return traces


def _find_best_so_far(
    evaluations: Sequence[Evaluation], order: Mapping[int, int]
) -> tuple[list[int], list[float]]:
    """Return for each new best the number of evaluations that had ended, and its loss."""
    first = find_best(evaluation for evaluation in evaluations if evaluation.imported_from)
    x, y = ([0], [first.loss]) if first else ([], [])
    for evaluation in find_improvements(evaluations):
        x.append(order[evaluation.trial])
        y.append(evaluation.loss)
    if x:
        x.append(len(order))
        y.append(y[-1])
    return x, y


def draw_learning_curves(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Figure | None:
    """Draw the loss of each evaluation after each epoch, with a mark at the final epoch.

    Return None if no evaluation has at least two epochs.
    """
    with_curve = [
        evaluation
        for evaluation in evaluations
        # The trial that continues a promoted one contains its losses.
        if evaluation.state != "promoted"
        and (len(evaluation.curve) > 1 or (evaluation.curve and evaluation.state != "complete"))
    ]
    shown = sample_evaluations(with_curve)
    if not any(len(evaluation.curve) > 1 for evaluation in shown):
        return None
    losses = [loss for evaluation in with_curve for loss in evaluation.curve.values()]
    axis = LossAxis(losses, find_complete_losses(evaluations))
    traces: list[Trace] = []
    for state, colour, symbol in STATE_MARKERS:
        group = [evaluation for evaluation in shown if evaluation.state == state]
        if group:
            marker = {"color": colour, "symbol": symbol, "size": 4 if state == "complete" else 7}
            traces += _draw_curves(group, axis, state, marker)
    if winner is not None:
        line = {"color": "--accent", "width": 2.5}
        traces.append(_draw_curve(winner, axis, f"best: trial {winner.trial}", line))
    epochs = make_axis("epoch", [max(evaluation.curve) for evaluation in shown], whole=True)
    description = (
        "The loss after each epoch of every evaluation. "
        "A mark shows its end, and names it when the pointer is on it."
    )
    return Figure(
        "curves",
        "Learning curves",
        description,
        traces,
        {"xaxis": epochs, **axis.make_layout(losses)},
        height=420,
        out_of_range_note=axis.describe_out_of_range(
            [max(evaluation.curve.values()) for evaluation in with_curve]
        ),
    )


def _draw_curves(
    group: Sequence[Evaluation], axis: LossAxis, name: str, marker: Mapping[str, Any]
) -> list[Trace]:
    """Draw curves with a mark at each end, and a triangle at each highest loss out of range."""
    x, y = join_lines((list(e.curve), axis.compute_heights(e.curve.values())) for e in group)
    line = {"color": marker["color"], "width": 1}
    lines = make_line(x, y, line, opacity=0.45, name=name, legendgroup=name, showlegend=False)
    inside, outside, highest = [], [], []
    for evaluation in group:
        curve = evaluation.curve
        if axis.scale.is_out_of_range(curve[max(curve)]):
            outside.append((evaluation, max(curve)))
        else:
            inside.append((evaluation, max(curve)))
            highest.append((evaluation, max(curve, key=curve.__getitem__)))
    return [
        lines,
        _draw_marks([*inside, *outside], axis, name, marker),  # The legend shows the first symbol.
        *_draw_triangles(highest, axis, name, marker["color"]),
    ]


def _draw_triangles(
    points: Sequence[Point], axis: LossAxis, group: str, colour: str
) -> list[Trace]:
    """Draw a triangle at each point whose loss is out of range."""
    far = [(e, epoch) for e, epoch in points if axis.scale.is_out_of_range(e.curve[epoch])]
    marks = _draw_marks(far, axis, group, {"color": colour, "symbol": "", "size": 0})
    return [{**marks, "showlegend": False}] if far else []


def _draw_marks(
    points: Sequence[Point], axis: LossAxis, name: str, marker: Mapping[str, Any]
) -> Trace:
    """Draw a mark at each point. If its loss is out of range, the label contains it."""
    epochs = [epoch for _, epoch in points]
    losses = [evaluation.curve[epoch] for evaluation, epoch in points]
    trace = axis.draw_points(epochs, [evaluation for evaluation, _ in points], name, marker, losses)
    trace["text"] = [
        text + axis.format_high_loss(loss, f" after epoch {epoch}")
        for text, loss, epoch in zip(trace["text"], losses, epochs, strict=True)
    ]
    return {**trace, "legendgroup": name}


def draw_rungs(
    evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives
) -> Figure | None:
    """Draw each individual at each rung, with its lowest loss until then; None without rungs."""
    halving = HALVING_SCHEDULES.get(pruner)
    rungs = compute_rungs(halving, evaluations, objectives) if halving else []
    if not rungs:
        return None
    groups = group_by_individual(evaluations)
    reached = [
        (index, loss, groups[root])
        for index, rung in enumerate(rungs)
        for loss, root in rung.losses[: MAX_POINTS // len(rungs)]
    ]
    losses = [loss for _, loss, _ in reached]
    continued = [loss for rung in rungs for loss, _ in rung.losses[: rung.promoted_count]]
    axis = LossAxis(losses, continued)
    by_outcome: dict[str, list[tuple[float, float, Evaluation]]] = {}
    positions = spread_points([index for index, _, _ in reached])
    for x, (index, loss, group) in zip(positions, reached, strict=True):
        outcome = _find_outcome(rungs[index], group)
        by_outcome.setdefault(outcome, []).append((x, loss, group[-1]))
    traces: list[Trace] = []
    for name, colour, symbol in _OUTCOMES:
        if name in by_outcome:
            xs, own, individuals = zip(*by_outcome[name], strict=True)
            marker = {"color": colour, "symbol": symbol, "size": 7}
            trace = axis.draw_points(xs, individuals, name, marker, own)
            trace["text"] = [
                f"{text}<br>at this rung: {format_number(loss)}{axis.format_high_loss(loss)}"
                for text, loss in zip(trace["text"], own, strict=True)
            ]
            traces.append(trace)
    ticks = {"tickvals": list(range(len(rungs))), "ticktext": _format_rung_names(rungs)}
    layout = {"xaxis": {**ticks, "zeroline": False}, **axis.make_layout(losses)}
    description = (
        "Each point is an individual at a rung, "
        "with its lowest loss until then and its outcome there."
    )
    note = axis.describe_out_of_range(losses, "point")
    return Figure("rungs", "Rungs", description, traces, layout, out_of_range_note=note)


def _find_outcome(rung: Rung, group: Sequence[Evaluation]) -> str:
    latest = group[-1]
    if latest.state == "failed":
        return "failed"
    if latest.state == "paused" and latest.paused_after == rung.epochs:
        return "paused"
    if any(e.state == "promoted" and e.paused_after == rung.epochs for e in group):
        return "promoted later"
    was_pruned = latest.state == "pruned" and max(latest.curve, default=0) == rung.epochs
    return "pruned" if was_pruned else "continued"


def _format_rung_names(rungs: Sequence[Rung]) -> list[str]:
    names = [f"after {format_count(rung.epochs, 'epoch')}" for rung in rungs]
    if len({rung.bracket for rung in rungs}) == 1:
        return names
    return [f"{name}<br>bracket {rung.bracket}" for name, rung in zip(names, rungs, strict=True)]
