"""Draw the run: losses, hyperparameters, curves, rungs, lineages, workers, and immigrants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from hpo.objectives import Objectives
from hpo.results.display_names import collect_names, name_params
from hpo.results.summary import list_best_so_far
from hpo.store.evaluations import (
    Evaluation,
    group_by_individual,
    rank_evaluations,
    sort_by_end,
)
from hpo.store.inheritance import trace_lineage
from hpo.store.pruning import HALVING_SCHEDULES, Rung, compute_rungs
from hpo.text_format import format_count, format_duration, format_number, format_value
from hpo.views.loss_scale import LossScale, find_complete_losses
from hpo.views.page.figure import (
    EDGE_POSITION,
    MAX_POINTS,
    STATE_MARKERS,
    TRIANGLE_SIZE,
    TRIANGLE_SYMBOL,
    Figure,
    LossAxis,
    Trace,
    UprightAxis,
    draw_failure_strip,
    escape_markup,
    find_island_colour,
    find_island_symbol,
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
from hpo.views.times import WorkingTime, compute_end

Point = tuple[Evaluation, int]
"""An evaluation, and the epoch of one of its losses."""

# Pixels of the timeline, with space for a legend of five rows, because Plotly keeps at least 64
# pixels for the axes.
_MIN_TIMELINE_HEIGHT = 220
_MAX_SCHEDULE_ROWS = 8  # of the figure of a schedule
_SCHEDULE_ROW_HEIGHT = 90  # pixels
_SCHEDULE_ROW_GAP = 0.02  # fraction of the height
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
    improved = list_best_so_far(evaluations)
    best_x = [order.get(evaluation.trial, 0) for evaluation in improved]
    best_y = [evaluation.loss for evaluation in improved]
    if improved:
        best_x.append(len(order))
        best_y.append(best_y[-1])
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


def draw_learning_curves(
    evaluations: Sequence[Evaluation], winner: Evaluation | None
) -> Figure | None:
    """Draw the loss of each evaluation after each epoch, with a mark at the final epoch.

    Return None if no evaluation has at least two epochs.
    """
    with_curve = [
        e
        for e in evaluations
        # The trial that continues a promoted one contains its losses.
        if e.state != "promoted" and (len(e.curve) > 1 or (e.curve and e.state != "complete"))
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
        out_of_range_note=axis.describe_out_of_range([max(e.curve.values()) for e in with_curve]),
    )


def _draw_curves(
    group: Sequence[Evaluation], axis: LossAxis, name: str, marker: Mapping[str, Any]
) -> list[Trace]:
    """Draw curves with a mark at each end, and a triangle at each highest loss out of range."""
    x, y = join_lines((list(e.curve), axis.compute_heights(e.curve.values())) for e in group)
    line = {"color": marker["color"], "width": 1}
    lines = make_line(x, y, line, opacity=0.45, name=name, legendgroup=name, showlegend=False)
    inside = []
    outside = []
    highest = []
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
    several = len({rung.bracket for rung in rungs}) > 1
    names = [
        f"after {format_count(rung.epochs, 'epoch')}" + f"<br>bracket {rung.bracket}" * several
        for rung in rungs
    ]
    ticks = {"tickvals": list(range(len(rungs))), "ticktext": names}
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


def draw_descent(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw losses over the total epochs of lineages, with lines to children; None without any."""
    known = {evaluation.trial: evaluation for evaluation in evaluations}
    complete = [evaluation for evaluation in evaluations if evaluation.state == "complete"]
    if not any(evaluation.inherits in known for evaluation in complete):
        return None
    shown = sample_evaluations(complete)
    epochs: dict[int, int] = {}  # of each trial and its ancestors
    for evaluation in evaluations:  # A parent has a lower trial number than its child.
        before = 0 if evaluation.inherits is None else epochs.get(evaluation.inherits, 0)
        epochs[evaluation.trial] = before + len(evaluation.curve)
    losses = [evaluation.loss for evaluation in shown]
    axis = LossAxis(losses, find_complete_losses(evaluations))

    def make_path(line: Sequence[Evaluation]) -> tuple[list[int], list[float]]:
        return (
            [epochs[evaluation.trial] for evaluation in line],
            axis.compute_heights(evaluation.loss for evaluation in line),
        )

    pairs = [(known[e.inherits], e) for e in shown if e.inherits in known]
    x, y = join_lines(map(make_path, pairs))
    faint = {"color": "--muted", "width": 1}
    traces: list[Trace] = [make_line(x, y, faint, name="inherits", opacity=0.5)]
    for island in sorted({evaluation.island for evaluation in shown}):
        group = [evaluation for evaluation in shown if evaluation.island == island]
        marker = {"color": find_island_colour(island), "symbol": find_island_symbol(island)}
        x, _ = make_path(group)
        traces.append(axis.draw_points(x, group, f"island {island}", {**marker, "size": 6}))
    if winner is not None:
        accent = {"color": "--accent", "width": 2.5}
        path = make_path(trace_lineage(winner, known))
        traces.append(make_line(*path, accent, name="lineage of the best"))
    layout = {
        "xaxis": make_axis("epochs of the whole lineage", list(epochs.values()), whole=True),
        **axis.make_layout(losses),
    }
    description = (
        "Each point is a complete evaluation. "
        "A line connects it with the trial whose weights it began with."
    )
    note = axis.describe_out_of_range(losses)
    return Figure("descent", "Lineage", description, traces, layout, out_of_range_note=note)


def draw_schedule(
    evaluations: Sequence[Evaluation], winner: Evaluation | None, distributions: Mapping[str, Any]
) -> Figure | None:
    """Draw losses and changed hyperparameters over the epochs of the winner and its ancestors.

    Return None if the winner has no ancestors.
    """
    known = {evaluation.trial: evaluation for evaluation in evaluations}
    line = trace_lineage(winner, known) if winner is not None else []
    if len(line) < 2:
        return None
    every = collect_names(evaluation.params for evaluation in line)
    changed = [name for name in every if len({e.params.get(name) for e in line}) > 1]
    names = changed[: _MAX_SCHEDULE_ROWS - 1]
    ends = list(itertools.accumulate(len(evaluation.curve) for evaluation in line))
    height = (1 - _SCHEDULE_ROW_GAP * len(names)) / (len(names) + 1)
    tops = [1 - row * (height + _SCHEDULE_ROW_GAP) for row in range(len(names) + 1)]
    domains = [[max(0.0, top - height), top] for top in tops]
    loss_trace, layout = _draw_loss_row(line, evaluations)
    layout["yaxis"]["domain"] = domains[0]
    traces = [loss_trace]
    for row, name in enumerate(names, start=2):
        trace, upright = _draw_value_row(line, ends, name, distributions[name])
        traces.append({**trace, "yaxis": f"y{row}"})
        layout[f"yaxis{row}"] = {**upright, "domain": domains[row - 1]}
    anchor = f"y{len(names) + 1}" if names else "y"
    layout["xaxis"] = {**make_axis("epoch", ends, whole=True), "anchor": anchor}
    description = (
        f"The lineage of the best, trial {line[-1].trial}, begins with trial {line[0].trial}. "
        "The figure shows its losses and how hyperparameters changed from trial to trial: "
        "the schedule that the search has found."
    )
    height_in_pixels = 120 + _SCHEDULE_ROW_HEIGHT * (len(names) + 1)
    return Figure("schedule", "Lineage of the best", description, traces, layout, height_in_pixels)


def _draw_loss_row(
    line: Sequence[Evaluation], evaluations: Sequence[Evaluation]
) -> tuple[Trace, dict[str, Any]]:
    points = [(evaluation.trial, loss) for evaluation in line for loss in evaluation.curve.values()]
    losses = [loss for _, loss in points]
    axis = LossAxis(losses, find_complete_losses(evaluations))
    texts = [f"trial {trial}: loss {format_number(loss)}" for trial, loss in points]
    epochs = list(range(1, len(losses) + 1))
    colour = {"color": "--accent", "width": 2}
    trace = make_line(epochs, axis.compute_heights(losses), colour, texts)
    return {**trace, "mode": "lines+markers"}, {**axis.make_layout(losses), "showlegend": False}


def _draw_value_row(
    line: Sequence[Evaluation], ends: Sequence[int], name: str, distribution: Any
) -> tuple[Trace, dict[str, Any]]:
    choices = getattr(distribution, "choices", None)
    values = []
    heights = []
    x = []
    y = []
    labels = []
    for evaluation, begin, end in zip(line, [0, *ends[:-1]], ends, strict=True):
        if name not in evaluation.params:
            continue
        value = evaluation.params[name]
        height = choices.index(value) if choices else value
        values.append(value)
        heights.append(height)
        x += [begin, end]
        y += [height if isinstance(height, int) else round_number(height)] * 2
        label = f"trial {evaluation.trial}: {name} = {format_value(value)}"
        labels += [escape_markup(label)] * 2
    upright = make_axis(name, heights, log=is_log(distribution))
    if choices:
        upright |= make_category_ticks(choices)
    elif len(upright.get("tickvals", [0, 0])) < 2:  # The range is too narrow for round numbers.
        ticks = [min(values), max(values)]
        texts = [escape_markup(format_value(tick)) for tick in ticks]
        upright |= {"tickvals": ticks, "ticktext": texts}
    return make_line(x, y, {"color": "--text", "width": 1.5}, labels), upright


def draw_timeline(
    evaluations: Sequence[Evaluation], workers: int, now: float | None
) -> Figure | None:
    """Draw the evaluations of each worker over time; None if no evaluation has started.

    Running evaluations are drawn until `now`, in seconds since the epoch; None if the run is not
    active.
    """
    started = _find_started(evaluations)
    if not started:
        return None
    # The offset of local time from UTC in seconds, since plotly has no time zones.
    offset = datetime.fromtimestamp(started[0].started).astimezone().utcoffset()
    utc_offset = offset.total_seconds() if offset else 0.0
    traces: list[Trace] = []
    for state, colour, _ in STATE_MARKERS:
        group = [evaluation for evaluation in started if evaluation.state == state]
        if group:
            colour = "--good" if state == "complete" else colour
            traces.append(_draw_bars(group, now, utc_offset, {"color": colour, "width": 11}))
            traces[-1]["name"] = state
    lanes = max(workers, 1 + max(evaluation.worker for evaluation in started))
    spans = WorkingTime(started, now).spans
    longest = max(60.0, (spans[-1][1] - spans[0][0]) / 50)
    pauses = [
        {"bounds": [round(1000 * (at + utc_offset)) for at in (end + 1, start - 1)]}
        for (_, end), (start, _) in pairwise(spans)
        if start - end > longest
    ]
    layout = {
        "xaxis": {"type": "date", "rangebreaks": pauses},
        "yaxis": {
            "title": {"text": "worker"},
            "range": [lanes - 0.4, -0.6],
            "dtick": max(1, lanes // 32),
            "zeroline": False,
            "showgrid": False,
        },
        "hovermode": "closest",
    }
    description = (
        "A bar is an evaluation, and a gap is a waiting worker. "
        "Pauses between sessions are not shown."
    )
    height = max(_MIN_TIMELINE_HEIGHT, 110 + 18 * min(lanes, 64))
    return Figure("timeline", "Timeline", description, traces, layout, height)


def _find_started(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    return [e for e in evaluations if not e.imported_from and math.isfinite(e.started)]


def _draw_bars(
    group: Sequence[Evaluation], now: float | None, utc_offset: float, line: dict[str, Any]
) -> Trace:
    lines = []
    texts = []
    for evaluation in group:
        ends = evaluation.started, compute_end(evaluation, now)
        milliseconds = [round(1000 * (end + utc_offset)) for end in ends]
        lines.append((milliseconds, [evaluation.worker] * 2))
        texts += [_format_bar_label(evaluation)] * 2 + [None]
    return make_line(*join_lines(lines), line, texts)


def _format_bar_label(evaluation: Evaluation) -> str:
    result = evaluation.state
    if math.isfinite(evaluation.loss):
        result = format_number(evaluation.loss)
    name = f"trial {evaluation.trial}"
    if evaluation.confirms is not None:
        name = f"confirms trial {evaluation.confirms}"
    return f"{name}: {result}, {format_duration(evaluation.seconds)}"


def draw_immigrants(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw the number of immigrants (individuals from other islands) on each island, if any."""
    bred = [evaluation for evaluation in _find_started(evaluations) if evaluation.propagator]
    if not any(evaluation.immigrants for evaluation in bred):
        return None
    traces: list[Trace] = []
    for island in sorted({evaluation.island for evaluation in bred}):
        group = [evaluation for evaluation in bred if evaluation.island == island]
        traces.append(
            {
                "x": [evaluation.trial for evaluation in group],
                "y": [sum(evaluation.immigrants.values()) for evaluation in group],
                "name": f"island {island}",
                "mode": "lines",
                "line": {"color": find_island_colour(island), "shape": "hv", "width": 2},
            }
        )
    highest = [max(trace["y"]) for trace in traces]
    upright = {**make_axis("immigrants", highest, whole=True), "rangemode": "tozero"}
    layout = {"xaxis": make_axis("trial"), "yaxis": upright}
    description = (
        "The number of individuals from other islands on an island when it began an evaluation."
    )
    return Figure("immigrants", "Exchange between islands", description, traces, layout, height=300)


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
