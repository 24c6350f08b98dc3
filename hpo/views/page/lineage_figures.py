"""Draw lineages: evaluations that began with the checkpoint of a parent, and the hyperparameters that changed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.display_names import collect_names
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import trace_lineage
from hpo.text_format import format_number, format_value
from hpo.views.loss_scale import find_complete_losses, make_loss_scale
from hpo.views.page.axes import escape_markup, is_log, make_axis, make_category_ticks, round_number
from hpo.views.page.figure import (
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
    make_loss_layout,
    make_loss_markers,
)

_MAX_ROWS = 8
_ROW_HEIGHT, _ROW_GAP = 90, 0.02  # pixels, fraction of the height


def draw_descent(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the loss of each complete evaluation over the total epochs of its lineage, with lines to its children.

    Return None if no evaluation has begun with the checkpoint of a parent.
    """
    known = {evaluation.trial: evaluation for evaluation in evaluations}
    complete = [evaluation for evaluation in evaluations if evaluation.state == "complete"]
    if not any(evaluation.inherits in known for evaluation in complete):
        return None
    shown = sample_evaluations(complete)
    epochs = _count_epochs(evaluations)
    losses = [evaluation.loss for evaluation in shown]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    pairs = [
        (known[evaluation.inherits], evaluation)
        for evaluation in shown
        if evaluation.inherits in known
    ]
    x, y = join_lines(
        ([epochs[a.trial], epochs[b.trial]], compute_loss_heights([a.loss, b.loss], scale))
        for a, b in pairs
    )
    faint = {"color": "--muted", "width": 1}
    traces: list[Trace] = [
        {
            "x": x,
            "y": y,
            "mode": "lines",
            "line": faint,
            "opacity": 0.5,
            "hoverinfo": "skip",
            "name": "inherits",
        }
    ]
    for island in sorted({evaluation.island for evaluation in shown}):
        group = [evaluation for evaluation in shown if evaluation.island == island]
        look = {
            "color": find_island_colour(island),
            "symbol": find_island_symbol(island),
            "size": 6,
        }
        trace = make_points(
            [epochs[evaluation.trial] for evaluation in group], group, f"island {island}"
        )
        traces.append(
            trace | make_loss_markers([evaluation.loss for evaluation in group], scale, look)
        )
    if winner is not None:
        line = trace_lineage(winner, known)
        path = {
            "x": [epochs[evaluation.trial] for evaluation in line],
            "y": compute_loss_heights([evaluation.loss for evaluation in line], scale),
        }
        look = {"color": "--accent", "width": 2.5}
        traces.append(
            {
                **path,
                "mode": "lines",
                "line": look,
                "name": "lineage of the best",
                "hoverinfo": "skip",
            }
        )
    layout = {
        "xaxis": make_axis("epochs of the whole lineage", list(epochs.values()), whole=True),
        **make_loss_layout(losses, scale),
    }
    description = "Each point is a complete evaluation. A line connects it with the trial whose weights it began with."
    return Figure(
        "descent",
        "Lineage",
        description,
        traces,
        layout,
        out_of_range_note=describe_out_of_range(losses, scale),
    )


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
    changed = [
        name for name in every if len({evaluation.params.get(name) for evaluation in line}) > 1
    ]
    names = changed[: _MAX_ROWS - 1]
    ends = list(itertools.accumulate(len(evaluation.curve) for evaluation in line))
    begins = [0, *ends[:-1]]
    losses = [loss for evaluation in line for loss in evaluation.curve.values()]
    texts = [
        f"trial {evaluation.trial}: loss {format_number(loss)}"
        for evaluation in line
        for loss in evaluation.curve.values()
    ]
    scale = make_loss_scale(losses, find_complete_losses(evaluations))
    colour = {"color": "--accent", "width": 2}
    loss: Trace = {
        "x": list(range(1, len(losses) + 1)),
        "y": compute_loss_heights(losses, scale),
        "mode": "lines+markers",
    }
    traces: list[Trace] = [
        {**loss, "line": colour, "text": texts, "hovertemplate": "%{text}<extra></extra>"}
    ]
    height = (1 - _ROW_GAP * len(names)) / (len(names) + 1)
    tops = [1 - row * (height + _ROW_GAP) for row in range(len(names) + 1)]
    layout: dict[str, Any] = make_loss_layout(losses, scale) | {"showlegend": False}
    layout["yaxis"]["domain"] = [max(0.0, tops[0] - height), tops[0]]
    for row, name in enumerate(names, start=2):
        having = [
            (evaluation.params[name], at)
            for evaluation, *at in zip(line, begins, ends, strict=True)
            if name in evaluation.params
        ]
        values = [item for item, _ in having]
        choices = getattr(distributions[name], "choices", None)
        heights = [choices.index(item) for item in values] if choices else values
        x = [at for _, pair in having for at in pair]
        y = [
            item if isinstance(item, int) else round_number(item)
            for item in heights
            for _ in (0, 1)
        ]
        trials = [evaluation.trial for evaluation in line if name in evaluation.params]
        labels = [
            escape_markup(f"trial {trial}: {name} = {format_value(item)}")
            for trial, item in zip(trials, values, strict=True)
            for _ in (0, 1)
        ]
        own: Trace = {
            "x": x,
            "y": y,
            "text": labels,
            "hovertemplate": "%{text}<extra></extra>",
            "mode": "lines",
        }
        traces.append({**own, "line": {"color": "--text", "width": 1.5}, "yaxis": f"y{row}"})
        upright = make_axis(name, heights, log=is_log(distributions[name]))
        if choices:
            upright |= make_category_ticks(choices)
        elif len(upright.get("tickvals", [0, 0])) < 2:  # The range is too narrow for round numbers.
            ends_of_range = [min(heights), max(heights)]
            upright |= {
                "tickvals": ends_of_range,
                "ticktext": [escape_markup(format_value(item)) for item in ends_of_range],
            }
        layout[f"yaxis{row}"] = {
            **upright,
            "domain": [max(0.0, tops[row - 1] - height), tops[row - 1]],
        }
    layout["xaxis"] = {
        **make_axis("epoch", ends, whole=True),
        "anchor": f"y{len(names) + 1}" if names else "y",
    }
    description = (
        f"The lineage of the best, trial {line[-1].trial}, begins with trial {line[0].trial}. The figure shows its "
        "losses and how hyperparameters changed from trial to trial: the schedule that the search has found."
    )
    return Figure(
        "schedule",
        "Lineage of the best",
        description,
        traces,
        layout,
        height=120 + _ROW_HEIGHT * (len(names) + 1),
    )


def _count_epochs(evaluations: Sequence[Evaluation]) -> dict[int, int]:
    """Return for each trial number the total number of epochs of the evaluation and its ancestors."""
    epochs: dict[int, int] = {}
    for evaluation in evaluations:  # A parent has a lower trial number than its child.
        before = 0 if evaluation.inherits is None else epochs.get(evaluation.inherits, 0)
        epochs[evaluation.trial] = before + len(evaluation.curve)
    return epochs
