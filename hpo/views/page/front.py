"""The Pareto front as figures: what was found, what of it nobody dominates, and how that came to be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.dominance import non_dominated
from hpo.objectives import Objectives
from hpo.results.history import in_order
from hpo.results.hypervolume import Box, box_of, over_time
from hpo.store.evaluations import Evaluation
from hpo.store.front import costs_of, front
from hpo.text import counted, number
from hpo.views.page.axes import axis, linear_ticks, plain
from hpo.views.page.edge import BELOW_EDGE, TRIANGLE_SIZE, apart, cut_axis, placed
from hpo.views.page.figure import Figure, Trace, drawn, label, points
from hpo.views.scale import Scale, scale_of

_FEWEST = 8  # evaluations: before, there is no earlier front to see
_LEAST = 1 / 4  # of an axis, from the best to a little behind the front
_EDGES = {
    "right": ("triangle-right", "\N{BLACK RIGHT-POINTING TRIANGLE} at the right edge"),
    "upper": ("triangle-up", "\N{BLACK UP-POINTING TRIANGLE} at the upper edge"),
    "lower": ("triangle-down", "\N{BLACK DOWN-POINTING TRIANGLE} at the lower edge"),
}


@dataclass(frozen=True)
class _Side:
    """An objective as an axis, at this `place` among all; `edge` is where values are drawn that are beyond its scale.

    If it is `turned`, the scale is that of the values with the other sign, of which the lowest are at the top.
    """

    name: str
    place: int
    scale: Scale
    edge: str
    turned: bool = False

    def of(self, one: Evaluation) -> float:
        """Return an evaluation's value on the scale."""
        return -one.values[self.place] if self.turned else one.values[self.place]

    def heights(self, evaluations: Sequence[Evaluation]) -> list[float]:
        """Return where on the axis evaluations are drawn."""
        return placed(map(self.of, evaluations), self.scale)

    def beyond(self, one: Evaluation) -> bool:
        """Tell whether an evaluation is beyond the scale."""
        return self.scale.beyond(self.of(one))

    def axis(self, cut: bool, title: str) -> dict[str, Any]:
        """Return the axis, with room for what is beyond the scale if it is `cut`."""
        scale = self.scale
        made = cut_axis(title, scale) if cut else axis(title, [scale.lowest, scale.highest], log=scale.logarithmic)
        if not self.turned:
            return made
        ticks = made.get("tickvals", linear_ticks(scale.lowest, scale.highest))
        ends = {"range": made["range"][::-1]} if cut else {"autorange": "reversed"}
        return {**made, "tickvals": ticks, "ticktext": [f"{-tick or 0.0:.8g}" for tick in ticks], **ends}

    def told(self, evaluations: Sequence[Evaluation]) -> str:
        """Return a sentence on how many evaluations are beyond the scale; empty where none is."""
        far = [one.values[self.place] for one in evaluations if self.beyond(one)]
        if not far:
            return ""
        verb, to = "goes" if len(far) == 1 else "go", f"down to {number(min(far))}"
        to = to if self.turned else f"up to {number(max(far))}"
        return (
            f"{counted(len(far), 'evaluation')} {verb} beyond the scale of {self.name}, {to}: {_EDGES[self.edge][1]}."
        )


def _side(evaluations: Sequence[Evaluation], objectives: Objectives, place: int, box: Box | None) -> _Side:
    """Return the axis of an objective; what is far worse than usual, or than the front, is beyond its scale."""
    name, values = objectives.names[place], [one.values[place] for one in evaluations]
    whole = Scale(min(values), max(values))
    costs = [-one for one in values] if name in objectives.maximized else values
    scale = _around(scale_of(costs, costs), costs, float(box.reference[place]) if box else math.inf)
    if name not in objectives.maximized:
        return _Side(name, place, scale, "upper" if place else "right")
    if not whole.logarithmic and (scale.logarithmic or scale.beyond(max(costs))):
        return _Side(name, place, scale, "lower", turned=True)
    return _Side(name, place, whole, "lower")


def _around(scale: Scale, costs: Sequence[float], reference: float) -> Scale:
    """Return a scale of which what lies before the reference has a quarter at least."""
    if scale.beyond(reference) or scale.share(reference) >= _LEAST:
        return scale
    end = scale.at(scale.share(reference) / _LEAST)
    return Scale(scale.lowest, max(cost for cost in costs if cost <= end))


def fronts(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Figure]:
    """Draw each objective but the loss over the loss, and the front; nothing without any."""
    complete = _complete(evaluations, objectives)
    if not complete or not objectives.are_several:
        return []
    groups, box = _groups(evaluations, objectives), box_of(complete, objectives)
    across, *others = [_side(complete, objectives, place, box) for place in range(len(objectives.names))]
    return [_figure(complete, groups, objectives, (across, up)) for up in others]


def _complete(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the complete evaluations with a finite value of each objective."""
    complete = [one for one in evaluations if one.state == "complete"]
    return [one for one in complete if all(map(math.isfinite, objectives.costs(one.values)))]


def _groups(evaluations: Sequence[Evaluation], objectives: Objectives) -> dict[str, list[Evaluation]]:
    """Return what was complete after a quarter and a half of the run and is now, each with a name."""
    given, ended = [one for one in evaluations if one.imported_from], in_order(evaluations)
    counts = (len(ended) // 4, len(ended) // 2) if len(ended) >= _FEWEST else ()
    before = {f"after {count} evaluations": _complete([*given, *ended[:count]], objectives) for count in counts}
    return {**before, "front": _complete(evaluations, objectives)}


def _figure(
    complete: Sequence[Evaluation],
    groups: Mapping[str, Sequence[Evaluation]],
    objectives: Objectives,
    sides: tuple[_Side, _Side],
) -> Figure:
    best = front(complete, objectives)
    across, up = sides
    on_front = {one.trial for one in best}
    others = drawn([one for one in complete if one.trial not in on_front])
    look, accent = {"color": "--muted", "size": 6, "opacity": 0.6}, {"color": "--accent", "size": 8, "opacity": 1}
    traces = [_dots(others, (across, up), objectives, "dominated", look)] if others else []
    traces += _lines(groups, (across, up), objectives)
    traces.append(_dots(drawn(best), (across, up), objectives, "on the front", accent))
    layout, shapes = {}, []
    for which, side in (("x", across), ("y", up)):
        cut = any(map(side.beyond, complete))
        title = f"{side.name} (maximised)" if side.name in objectives.maximized else side.name
        layout[f"{which}axis"] = side.axis(cut, title)
        shapes += [apart(which, side.scale.at(BELOW_EDGE))] if cut else []
    beyond = " ".join(filter(None, (side.told(complete) for side in (across, up))))
    about = _about(objectives, up.name, len(groups) > 1)
    title = f"{up.name} over the loss"
    return Figure(f"front-{up.place}", title, about, traces, {**layout, "shapes": shapes}, height=420, beyond=beyond)


def _about(objectives: Objectives, name: str, has_past: bool) -> str:
    text = "Each point is a complete evaluation. The line is the front"
    if len(objectives.names) > 2:
        text += f" of loss and {name} alone; individuals of the front that are not on it are better in something else"
    return text + (". Thinner lines are what it was before." if has_past else ".")


def _dots(
    evaluations: Sequence[Evaluation],
    sides: tuple[_Side, _Side],
    objectives: Objectives,
    name: str,
    look: dict[str, Any],
) -> Trace:
    """Draw evaluations as points, and as triangles at the edges where they are beyond a scale.

    These come last: the legend has the first symbol.
    """
    across, up = sides
    evaluations = sorted(evaluations, key=lambda one: any(side.beyond(one) for side in sides))
    edges = [next((side.edge for side in sides if side.beyond(one)), "") for one in evaluations]
    marker = {**look, "symbol": [_EDGES[edge][0] if edge else "circle" for edge in edges]}
    marker |= {"size": [TRIANGLE_SIZE if edge else look["size"] for edge in edges], "line": {"width": 0}}
    trace = points(across.heights(evaluations), evaluations, name)
    texts = [_label(one, objectives) for one in evaluations]
    return {**trace, "y": up.heights(evaluations), "text": texts, "marker": marker}


def _label(one: Evaluation, objectives: Objectives) -> str:
    """Return what an evaluation was, one fact per line, with the values of all objectives."""
    first, rest = label(one).split("<br>", 1)
    others = zip(objectives.others, one.others, strict=True)
    return "<br>".join([first, *(plain(f"{name} {number(value)}") for name, value in others), rest])


def _lines(
    groups: Mapping[str, Sequence[Evaluation]], sides: tuple[_Side, _Side], objectives: Objectives
) -> list[Trace]:
    """Draw the front of each group in two objectives as stairs, the last one strongest."""
    across, up = sides
    looks = (("--muted", 1, "dot"), ("--accent-soft", 1.5, "solid"), ("--accent", 2, "solid"))[-len(groups) :]
    traces: list[Trace] = []
    for (name, group), (colour, width, dash) in zip(groups.items(), looks, strict=True):
        stairs = _stairs(group, objectives, up.place)
        # What one of them dominates begins at its place, to the right of it, and ends above the next one.
        line = {"color": colour, "width": width, "dash": dash, "shape": "hv"}
        place = {"x": across.heights(stairs), "y": up.heights(stairs)}
        traces.append({**place, "name": name, "mode": "lines", "line": line, "hoverinfo": "skip"})
    return traces


def _stairs(evaluations: Sequence[Evaluation], objectives: Objectives, place: int) -> list[Evaluation]:
    """Return the evaluations that nobody dominates in the loss and one other objective, the lowest loss first."""
    costs = costs_of(evaluations, objectives)[:, [0, place]]
    kept = [one for one, is_kept in zip(evaluations, non_dominated(costs), strict=True) if is_kept]
    return sorted(kept, key=lambda one: one.loss)


def hypervolume(evaluations: Sequence[Evaluation], objectives: Objectives) -> Figure | None:
    """Draw how the hypervolume has grown; None where there is none, or nothing to see of it."""
    grown, ended = over_time(evaluations, objectives), len(in_order(evaluations))
    if not grown or ended < 2:
        return None
    x, y = [count for count, _ in grown], [round(share, 4) for _, share in grown]
    line = {"color": "--accent", "width": 2, "shape": "hv"}
    trace = {"x": [*x, ended], "y": [*y, y[-1]], "mode": "lines", "line": line, "name": "hypervolume"}
    trace["hovertemplate"] = "after %{x} evaluations: %{y:.1%}<extra></extra>"
    layout = {
        "xaxis": axis("evaluations that have ended"),
        "yaxis": {**axis("share of the box"), "tickformat": ".0%", "rangemode": "tozero"},
        "showlegend": False,
    }
    about = "How much of the box between the best and the worst of the front its individuals dominate, by then."
    return Figure("hypervolume", "Hypervolume", about, [trace], layout, height=280)
