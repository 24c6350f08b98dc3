"""Draw the outcome of individuals at each rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, group_by_individual
from hpo.store.pruning import HALVING_SCHEDULES, Rung, compute_rungs
from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import make_loss_scale
from hpo.views.page.figure import MAX_POINTS, Figure, Trace, make_points, spread_points
from hpo.views.page.out_of_range import (
    describe_out_of_range,
    format_high_loss,
    make_loss_layout,
    make_loss_markers,
)

# Outcomes of individuals at a rung, with colours and symbols.
_OUTCOMES = (
    ("continued", "--good", "circle"),
    ("promoted later", "--accent", "star"),
    ("paused", "--island-4", "diamond-open"),
    ("pruned", "--muted", "triangle-down-open"),
    ("failed", "--bad", "x"),
)


def draw_rungs(
    evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives
) -> Figure | None:
    """Draw a point for each individual at each rung, with its lowest loss up to this rung; None without rungs."""
    halving = HALVING_SCHEDULES.get(pruner)
    rungs = compute_rungs(halving, evaluations, objectives) if halving else []
    if not rungs:
        return None
    groups = group_by_individual(evaluations)
    reached = [
        (index, loss, root)
        for index, rung in enumerate(rungs)
        for loss, root in rung.losses[: MAX_POINTS // len(rungs)]
    ]
    positions = spread_points([index for index, _, _ in reached])
    shown = [
        (x, loss, groups[root][-1], _find_outcome(rungs[index], groups[root]))
        for x, (index, loss, root) in zip(positions, reached, strict=True)
    ]
    losses = [loss for _, loss, _, _ in shown]
    scale = make_loss_scale(
        losses, [loss for rung in rungs for loss, _ in rung.losses[: rung.promoted_count]]
    )
    traces: list[Trace] = []
    for name, colour, symbol in _OUTCOMES:
        group = [point for point in shown if point[3] == name]
        if group:
            trace = make_points(
                [x for x, *_ in group], [evaluation for _, _, evaluation, _ in group], name
            )
            rung_losses = [format_number(loss) for _, loss, _, _ in group]
            highs = [format_high_loss(loss, scale) for _, loss, _, _ in group]
            texts = zip(trace["text"], rung_losses, highs, strict=True)
            trace["text"] = [f"{text}<br>at this rung: {loss}{high}" for text, loss, high in texts]
            marker = {"color": colour, "symbol": symbol, "size": 7}
            traces.append(
                trace | make_loss_markers([loss for _, loss, _, _ in group], scale, marker)
            )
    xaxis = {
        "tickvals": list(range(len(rungs))),
        "ticktext": _format_rung_names(rungs),
        "zeroline": False,
    }
    layout = {"xaxis": xaxis, **make_loss_layout(losses, scale)}
    description = "Each point is an individual at a rung, with its lowest loss until then and its outcome there."
    return Figure(
        "rungs",
        "Rungs",
        description,
        traces,
        layout,
        out_of_range_note=describe_out_of_range(losses, scale, "point"),
    )


def _find_outcome(rung: Rung, group: Sequence[Evaluation]) -> str:
    latest = group[-1]
    if latest.state == "failed":
        return "failed"
    if latest.state == "paused" and latest.paused_after == rung.epochs:
        return "paused"
    if any(
        evaluation.state == "promoted" and evaluation.paused_after == rung.epochs
        for evaluation in group
    ):
        return "promoted later"
    return (
        "pruned"
        if latest.state == "pruned" and max(latest.curve, default=0) == rung.epochs
        else "continued"
    )


def _format_rung_names(rungs: Sequence[Rung]) -> list[str]:
    brackets: Mapping[int, str] = {rung.bracket: f"<br>bracket {rung.bracket}" for rung in rungs}
    return [
        f"after {format_count(rung.epochs, 'epoch')}{brackets[rung.bracket] if len(brackets) > 1 else ''}"
        for rung in rungs
    ]
