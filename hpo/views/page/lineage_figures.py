"""Draw lineages: evaluations that began with a parent's checkpoint, and what changed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.display_names import collect_names
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import trace_lineage
from hpo.text_format import format_number, format_value
from hpo.views.loss_scale import find_complete_losses
from hpo.views.page.axes import escape_markup, is_log, make_axis, make_category_ticks, round_number
from hpo.views.page.figure import (
    Figure,
    Trace,
    find_island_colour,
    find_island_symbol,
    join_lines,
    make_line,
    sample_evaluations,
)
from hpo.views.page.loss_axis import LossAxis

_MAX_ROWS = 8
_ROW_HEIGHT, _ROW_GAP = 90, 0.02  # pixels, fraction of the height


def draw_descent(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the loss of each complete evaluation over the total epochs of its lineage.

    Lines lead to its children. Return None if no evaluation has begun with the checkpoint of a
    parent.
    """
    known = {evaluation.trial: evaluation for evaluation in evaluations}
    complete = [evaluation for evaluation in evaluations if evaluation.state == "complete"]
    if not any(evaluation.inherits in known for evaluation in complete):
        return None
    shown = sample_evaluations(complete)
    epochs = _count_epochs(evaluations)
    losses = [evaluation.loss for evaluation in shown]
    axis = LossAxis(losses, find_complete_losses(evaluations))

    def make_path(line: Sequence[Evaluation]) -> tuple[list[int], list[float]]:
        return (
            [epochs[evaluation.trial] for evaluation in line],
            axis.compute_heights(evaluation.loss for evaluation in line),
        )

    pairs = [
        (known[evaluation.inherits], evaluation)
        for evaluation in shown
        if evaluation.inherits in known
    ]
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
    names = changed[: _MAX_ROWS - 1]
    ends = list(itertools.accumulate(len(evaluation.curve) for evaluation in line))
    height = (1 - _ROW_GAP * len(names)) / (len(names) + 1)
    tops = [1 - row * (height + _ROW_GAP) for row in range(len(names) + 1)]
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
    height_in_pixels = 120 + _ROW_HEIGHT * (len(names) + 1)
    return Figure("schedule", "Lineage of the best", description, traces, layout, height_in_pixels)


def _draw_loss_row(
    line: Sequence[Evaluation], evaluations: Sequence[Evaluation]
) -> tuple[Trace, dict[str, Any]]:
    """Return the losses of a lineage over its epochs, and the layout of their axis."""
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
    """Return the values of a hyperparameter in a lineage over its epochs, and their axis.

    Args:
        ends: Number of epochs of the lineage at the end of each evaluation.
    """
    choices = getattr(distribution, "choices", None)
    values, heights, x, y, labels = [], [], [], [], []
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


def _count_epochs(evaluations: Sequence[Evaluation]) -> dict[int, int]:
    """Return for each trial the number of epochs of the evaluation and its ancestors."""
    epochs: dict[int, int] = {}
    for evaluation in evaluations:  # A parent has a lower trial number than its child.
        before = 0 if evaluation.inherits is None else epochs.get(evaluation.inherits, 0)
        epochs[evaluation.trial] = before + len(evaluation.curve)
    return epochs
