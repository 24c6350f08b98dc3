"""Figures of losses: the best beside the runner-up, all in their order, and all over their epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hpo.report.page.axes import axis, loss_axis
from hpo.report.page.figure import STATES, Figure, Trace, drawn, island_colour, island_symbol, joined, points, shortened
from hpo.trials import Evaluation, rank


def runner_up(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Evaluation | None:
    """Give the evaluation with the lowest loss but for the winner's."""
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
    traces = [
        {
            "x": list(one.curve),
            "y": shortened(one.curve.values()),
            "name": f"{name}: trial {one.trial}",
            "mode": "lines+markers",
            "line": {"color": colour, "width": 2, "dash": dash},
        }
        for name, one, colour, dash in shown
        if one is not None
    ]
    epochs = axis("epoch", [max(curve, default=1) for curve in curves], whole=True)
    layout = {"xaxis": epochs, "yaxis": loss_axis([loss for curve in curves for loss in curve.values()])}
    return Figure("best", "The best beside the runner-up", "", traces, layout, height=300)


def history(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw each loss in the order in which evaluations ended, by island, and the best so far; None without any."""
    ended = sorted((one for one in evaluations if one.counts), key=lambda one: (one.ended, one.trial))
    if not ended:
        return None
    place = {one.trial: count for count, one in enumerate(ended, start=1)}
    shown = drawn([one for one in ended if math.isfinite(one.loss)])
    failed = drawn([one for one in ended if one.state == "failed"])
    traces = []
    for island in sorted({one.island for one in shown}):
        for state, suffix, open_ in (("complete", "", ""), ("pruned", ", pruned", "-open")):
            group = [one for one in shown if (one.island, one.state) == (island, state)]
            if group:
                trace = points([place[one.trial] for one in group], group, f"island {island}{suffix}")
                trace["marker"] = {"color": island_colour(island), "symbol": island_symbol(island) + open_, "size": 7}
                traces.append(trace)
    traces.append(_best_so_far(evaluations, ended, place))
    layout = {"xaxis": axis("evaluations that have ended"), "yaxis": loss_axis([one.loss for one in shown])}
    if failed:  # they have no loss: a strip above the others
        marks = {"color": "--bad", "symbol": "x-thin-open", "size": 8}
        strip = points([place[one.trial] for one in failed], failed, "failed")
        traces.append({**strip, "y": [0] * len(failed), "yaxis": "y2", "marker": marks})
        layout["yaxis"]["domain"] = [0, 0.93]
        layout["yaxis2"] = {"domain": [0.96, 1], "visible": False, "fixedrange": True}
    about = "Each point is an evaluation; the line is the best so far."
    return Figure("history", "History", about, traces, layout)


def _best_so_far(evaluations: Sequence[Evaluation], ended: Sequence[Evaluation], place: Mapping[int, int]) -> Trace:
    best = min((one.loss for one in evaluations if one.origin and one.state == "complete"), default=math.inf)
    x, y = ([0], [best]) if math.isfinite(best) else ([], [])
    for one in ended:
        if one.state == "complete" and one.loss < best:
            best = one.loss
            x.append(place[one.trial])
            y.append(best)
    if x:
        x.append(len(ended))
        y.append(best)
    line = {"color": "--text", "width": 1.5, "shape": "hv"}
    return {"x": x, "y": shortened(y), "name": "best so far", "mode": "lines", "line": line, "hoverinfo": "skip"}


def learning_curves(evaluations: Sequence[Evaluation], winner: Evaluation | None) -> Figure | None:
    """Draw the losses of all evaluations after each epoch, the ends of pruned and failed ones marked."""
    shown = drawn([one for one in evaluations if len(one.curve) > 1 or (one.curve and one.state != "complete")])
    if not any(len(one.curve) > 1 for one in shown):
        return None
    traces: list[Trace] = []
    for state, colour, symbol in STATES:
        group = [one for one in shown if one.state == state]
        if not group:
            continue
        x, y = joined((list(one.curve), list(one.curve.values())) for one in group)
        line = {"color": colour, "width": 1}
        lines = {"x": x, "y": shortened(y), "mode": "lines", "line": line, "opacity": 0.45, "hoverinfo": "skip"}
        ends = points([max(one.curve) for one in group], group, state)
        ends |= {"y": shortened(one.curve[max(one.curve)] for one in group), "legendgroup": state}
        ends["marker"] = {"color": colour, "symbol": symbol, "size": 4 if state == "complete" else 7}
        traces += [{**lines, "name": state, "legendgroup": state, "showlegend": False}, ends]
    if winner is not None:
        line = {"color": "--accent", "width": 2.5}
        x, y = list(winner.curve), shortened(winner.curve.values())
        traces.append({"x": x, "y": y, "name": f"best: trial {winner.trial}", "mode": "lines", "line": line})
    losses = [loss for one in shown for loss in one.curve.values()]
    layout = {"xaxis": axis("epoch", [max(one.curve) for one in shown], whole=True), "yaxis": loss_axis(losses)}
    about = "The loss after each epoch of every evaluation. A mark is where it ended, and says which one it was."
    return Figure("curves", "Learning curves", about, traces, layout, height=420)
