"""The figure of a pruner that pauses: what became of individuals at each rung that they have reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation, individuals
from hpo.store.rungs import HALVINGS, Rung, rungs_of
from hpo.text import counted, number
from hpo.views.page.edge import loss_layout, marked, said, told
from hpo.views.page.figure import MOST_POINTS, Figure, Trace, points, spread
from hpo.views.scale import scale_of

# What became of individuals at a rung, with colours and symbols.
_FATES = (
    ("went on", "--good", "circle"),
    ("promoted later", "--accent", "star"),
    ("paused", "--island-4", "diamond-open"),
    ("given up", "--muted", "triangle-down-open"),
    ("failed", "--bad", "x"),
)


def rungs_reached(evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives) -> Figure | None:
    """Draw the lowest loss of each individual at each rung that it has reached; None where there are no rungs."""
    halving = HALVINGS.get(pruner)
    rungs = rungs_of(halving, evaluations, objectives) if halving else []
    if not rungs:
        return None
    groups = individuals(evaluations)
    reached = [(place, *one) for place, rung in enumerate(rungs) for one in rung.losses[: MOST_POINTS // len(rungs)]]
    places = spread([place for place, _, _ in reached])
    shown = [
        (x, loss, groups[root][-1], _fate(rungs[place], groups[root]))
        for x, (place, loss, root) in zip(places, reached, strict=True)
    ]
    losses = [loss for _, loss, _, _ in shown]
    scale = scale_of(losses, [loss for rung in rungs for loss, _ in rung.losses[: rung.go_on]])
    traces: list[Trace] = []
    for name, colour, symbol in _FATES:
        group = [one for one in shown if one[3] == name]
        if group:
            trace = points([x for x, *_ in group], [one for _, _, one, _ in group], name)
            at = [number(loss) for _, loss, _, _ in group]
            highs = [said(loss, scale) for _, loss, _, _ in group]
            texts = zip(trace["text"], at, highs, strict=True)
            trace["text"] = [f"{text}<br>at this rung: {loss}{high}" for text, loss, high in texts]
            look = {"color": colour, "symbol": symbol, "size": 7}
            traces.append(trace | marked([loss for _, loss, _, _ in group], scale, look))
    xaxis = {"tickvals": list(range(len(rungs))), "ticktext": _names(rungs), "zeroline": False}
    layout = {"xaxis": xaxis, **loss_layout(losses, scale)}
    about = "Each point is an individual at a rung, with its lowest loss until then, and what became of it there."
    return Figure("rungs", "Rungs", about, traces, layout, beyond=told(losses, scale, "point"))


def _fate(rung: Rung, group: Sequence[Evaluation]) -> str:
    latest = group[-1]
    if latest.state == "failed":
        return "failed"
    if latest.state == "paused" and latest.paused_after == rung.epochs:
        return "paused"
    if any(one.state == "promoted" and one.paused_after == rung.epochs for one in group):
        return "promoted later"
    return "given up" if latest.state == "pruned" and max(latest.curve, default=0) == rung.epochs else "went on"


def _names(rungs: Sequence[Rung]) -> list[str]:
    brackets: Mapping[int, str] = {rung.bracket: f"<br>bracket {rung.bracket}" for rung in rungs}
    return [
        f"after {counted(rung.epochs, 'epoch')}{brackets[rung.bracket] if len(brackets) > 1 else ''}" for rung in rungs
    ]
