"""Figures of losses: the best beside the runner-up, all in their order, and all over their epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.history import improvements, in_order
from hpo.store.evaluations import Evaluation, rank
from hpo.store.evaluations import best as best_of
from hpo.text import number
from hpo.views.page.axes import axis
from hpo.views.page.edge import loss_layout, marked, placed, said, told
from hpo.views.page.figure import STATES, Figure, Trace, drawn, island_colour, island_symbol, joined, points
from hpo.views.scale import Scale, complete_losses, scale_of


def runner_up(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Evaluation | None:
    """Return the evaluation with the lowest loss, the winner left out; None where there is none."""
    return next((one for one in rank(evaluations, 2) if winner is None or one.trial != winner.trial), None)


def best_and_runner_up(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the losses of the winner and the runner-up after each epoch; None where there are none to draw."""
    shown = (
        ("best", winner, "--accent", "solid"),
        ("runner-up", runner_up(evaluations, winner), "--muted", "dot"),
    )
    curves = [one.curve for _, one, _, _ in shown if one is not None]
    if max(map(len, curves), default=0) < 2:
        return None
    losses = [loss for curve in curves for loss in curve.values()]
    scale = scale_of(losses, complete_losses(evaluations))
    traces: list[Trace] = []
    for name, one, colour, dash in shown:
        if one is not None:
            line = {"color": colour, "width": 2, "dash": dash}
            trace = _curve(one, scale, f"{name}: trial {one.trial}", line)
            far = [(one, epoch) for epoch, loss in one.curve.items() if scale.beyond(loss)]
            traces += [{**trace, "mode": "lines+markers"}, *_triangles(far, scale, trace["name"], colour)]
    epochs = axis("epoch", [max(curve, default=1) for curve in curves], whole=True)
    beyond = told(losses, scale, "point")
    layout = {"xaxis": epochs, **loss_layout(losses, scale)}
    return Figure("best", "The best beside the runner-up", "", traces, layout, height=300, beyond=beyond)


def _curve(one: Evaluation, scale: Scale, name: str, line: Mapping[str, Any]) -> Trace:
    """Draw the loss of one evaluation after each epoch."""
    return {
        "x": list(one.curve),
        "y": placed(one.curve.values(), scale),
        "text": [number(loss) for loss in one.curve.values()],
        "hovertemplate": "epoch %{x}: loss %{text}",
        "name": name,
        "legendgroup": name,
        "mode": "lines",
        "line": line,
    }


def history(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw each loss in the order in which evaluations ended, by island, and the best so far; None without any."""
    ended = in_order(evaluations)
    if not ended:
        return None
    place = {one.trial: count for count, one in enumerate(ended, start=1)}
    with_loss = [one for one in ended if math.isfinite(one.loss)]
    losses = [one.loss for one in with_loss]
    best_x, best_y = _best_so_far(evaluations, ended, place)
    scale = scale_of([*losses, *best_y], complete_losses(evaluations))
    shown = sorted(drawn(with_loss), key=lambda one: scale.beyond(one.loss))  # the legend has the first symbol
    failed = drawn([one for one in ended if one.state == "failed"])
    traces = []
    for island in sorted({one.island for one in shown}):
        for state, suffix, open_ in (
            ("complete", "", ""),
            ("pruned", ", pruned", "-open"),
            ("paused", ", paused", "-open-dot"),
        ):
            group = [one for one in shown if (one.island, one.state) == (island, state)]
            if group:
                look = {"color": island_colour(island), "symbol": island_symbol(island) + open_, "size": 7}
                trace = points([place[one.trial] for one in group], group, f"island {island}{suffix}")
                traces.append(trace | marked([one.loss for one in group], scale, look))
    line = {"color": "--text", "width": 1.5, "shape": "hv"}
    best = {"x": best_x, "y": placed(best_y, scale), "name": "best so far", "mode": "lines", "line": line}
    traces.append({**best, "hoverinfo": "skip"})
    layout = {"xaxis": axis("evaluations that have ended"), **loss_layout([*losses, *best_y], scale)}
    if failed:  # they have no loss: a strip above the others
        marks = {"color": "--bad", "symbol": "x-thin-open", "size": 8}
        strip = points([place[one.trial] for one in failed], failed, "failed")
        traces.append({**strip, "y": [0] * len(failed), "yaxis": "y2", "marker": marks})
        layout["yaxis"]["domain"] = [0, 0.93]
        layout["yaxis2"] = {"domain": [0.96, 1], "visible": False, "fixedrange": True}
    about = "Each point is an evaluation; the line is the best so far."
    return Figure("history", "History", about, traces, layout, beyond=told(losses, scale))


def _best_so_far(
    evaluations: Sequence[Evaluation], ended: Sequence[Evaluation], place: Mapping[int, int]
) -> tuple[list[int], list[float]]:
    first = best_of(one for one in evaluations if one.imported_from)
    x, y = ([0], [first.loss]) if first else ([], [])
    for one in improvements(evaluations):
        x.append(place[one.trial])
        y.append(one.loss)
    if x:
        x.append(len(ended))
        y.append(y[-1])
    return x, y


def learning_curves(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the losses of all evaluations after each epoch, the ends of pruned and failed ones marked."""
    last = [one for one in evaluations if one.state != "promoted"]  # what goes on has the losses until then, too
    with_curve = [one for one in last if len(one.curve) > 1 or (one.curve and one.state != "complete")]
    shown = drawn(with_curve)
    if not any(len(one.curve) > 1 for one in shown):
        return None
    losses = [loss for one in with_curve for loss in one.curve.values()]
    scale = scale_of(losses, complete_losses(evaluations))
    traces: list[Trace] = []
    for state, colour, symbol in STATES:
        group = [one for one in shown if one.state == state]
        if group:
            look = {"color": colour, "symbol": symbol, "size": 4 if state == "complete" else 7}
            traces += _group(group, scale, state, look)
    if winner is not None:
        line = {"color": "--accent", "width": 2.5}
        traces.append(_curve(winner, scale, f"best: trial {winner.trial}", line))
    epochs = axis("epoch", [max(one.curve) for one in shown], whole=True)
    layout = {"xaxis": epochs, **loss_layout(losses, scale)}
    about = "The loss after each epoch of every evaluation. A mark is where it ended, and says which one it was."
    beyond = told([max(one.curve.values()) for one in with_curve], scale)
    return Figure("curves", "Learning curves", about, traces, layout, height=420, beyond=beyond)


def _group(group: Sequence[Evaluation], scale: Scale, name: str, look: Mapping[str, Any]) -> list[Trace]:
    """Draw curves and a mark at the end of each, and a triangle for those that are beyond the scale before that."""
    x, y = joined((list(one.curve), placed(one.curve.values(), scale)) for one in group)
    line = {"color": look["color"], "width": 1}
    lines = {"x": x, "y": y, "mode": "lines", "line": line, "opacity": 0.45, "hoverinfo": "skip"}
    ends = [(one, max(one.curve)) for one in group]
    inside = [(one, epoch) for one, epoch in ends if not scale.beyond(one.curve[epoch])]
    outside = [(one, epoch) for one, epoch in ends if scale.beyond(one.curve[epoch])]
    highest = [(one, max(one.curve, key=one.curve.__getitem__)) for one, _ in inside]
    far = [(one, epoch) for one, epoch in highest if scale.beyond(one.curve[epoch])]
    return [
        {**lines, "name": name, "legendgroup": name, "showlegend": False},
        _marks([*inside, *outside], scale, name, look),  # the legend has the first symbol
        *_triangles(far, scale, name, look["color"]),
    ]


def _triangles(places: Sequence[tuple[Evaluation, int]], scale: Scale, group: str, colour: str) -> list[Trace]:
    """Mark where curves are beyond the scale."""
    marks = _marks(places, scale, group, {"color": colour, "symbol": "", "size": 0})
    return [{**marks, "showlegend": False}] if places else []


def _marks(places: Sequence[tuple[Evaluation, int]], scale: Scale, name: str, look: Mapping[str, Any]) -> Trace:
    """Mark evaluations at their loss after an epoch; what is beyond the scale says how high it is."""
    losses = [one.curve[epoch] for one, epoch in places]
    trace = points([epoch for _, epoch in places], [one for one, _ in places], name)
    highs = [said(one.curve[epoch], scale, f" after epoch {epoch}") for one, epoch in places]
    texts = [text + high for text, high in zip(trace["text"], highs, strict=True)]
    return {**trace, **marked(losses, scale, look), "text": texts, "legendgroup": name}
