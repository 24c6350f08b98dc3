"""Draw the Pareto front: evaluations, the front, earlier fronts, and the hypervolume over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.dominance import find_non_dominated
from hpo.objectives import Objectives
from hpo.results.hypervolume import ReferenceBox, compute_shares_over_time, make_box
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.pareto_front import compute_costs, find_front
from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import LossScale, make_loss_scale
from hpo.views.page.axes import compute_linear_ticks, escape_markup, make_axis
from hpo.views.page.figure import Figure, Trace, format_label, make_points, sample_evaluations
from hpo.views.page.out_of_range import (
    SEPARATOR_POSITION,
    TRIANGLE_SIZE,
    compute_loss_heights,
    make_cut_axis,
    make_separator,
)

_MIN_EVALUATIONS = 8  # Runs with fewer evaluations have no earlier fronts.
# Of an axis, for the range from the best value to the reference point of the front.
_MIN_FRONT_FRACTION = 1 / 4
_EDGES = {
    "right": ("triangle-right", "\N{BLACK RIGHT-POINTING TRIANGLE} at the right edge"),
    "upper": ("triangle-up", "\N{BLACK UP-POINTING TRIANGLE} at the upper edge"),
    "lower": ("triangle-down", "\N{BLACK DOWN-POINTING TRIANGLE} at the lower edge"),
}


@dataclass(frozen=True)
class _FrontAxis:
    """The axis of a figure that shows one objective.

    Attributes:
        name: Name of the objective.
        index: Index of the objective, 0 for the loss.
        scale: Scale of the values, or of the negated values if `is_reversed`.
        edge: Key in _EDGES of the edge where out-of-range values are drawn.
        is_reversed: Whether `scale` has negated values, so that the axis must be drawn in reverse.
    """

    name: str
    index: int
    scale: LossScale
    edge: str
    is_reversed: bool = False

    def compute_value(self, evaluation: Evaluation) -> float:
        """Return the value of an evaluation, negated if `is_reversed`."""
        return -evaluation.values[self.index] if self.is_reversed else evaluation.values[self.index]

    def compute_heights(self, evaluations: Sequence[Evaluation]) -> list[float]:
        """Return the positions of evaluations on the axis."""
        return compute_loss_heights(map(self.compute_value, evaluations), self.scale)

    def is_out_of_range(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation is beyond the scale."""
        return self.scale.is_out_of_range(self.compute_value(evaluation))

    def make_layout(self, cut: bool, title: str) -> dict[str, Any]:
        """Return the axis for plotly, with space for out-of-range values if `cut`."""
        scale = self.scale
        made = (
            make_cut_axis(title, scale)
            if cut
            else make_axis(title, [scale.lowest, scale.highest], log=scale.is_logarithmic)
        )
        if not self.is_reversed:
            return made
        ticks = made.get("tickvals", compute_linear_ticks(scale.lowest, scale.highest))
        ends = {"range": made["range"][::-1]} if cut else {"autorange": "reversed"}
        return {
            **made,
            "tickvals": ticks,
            "ticktext": [f"{-tick or 0.0:.8g}" for tick in ticks],
            **ends,
        }

    def describe_out_of_range(self, evaluations: Sequence[Evaluation]) -> str:
        """Return a sentence with the number of evaluations beyond the scale; empty if there are none."""
        far = [
            evaluation.values[self.index]
            for evaluation in evaluations
            if self.is_out_of_range(evaluation)
        ]
        if not far:
            return ""
        verb, to = "goes" if len(far) == 1 else "go", f"down to {format_number(min(far))}"
        to = to if self.is_reversed else f"up to {format_number(max(far))}"
        count = format_count(len(far), "evaluation")
        return f"{count} {verb} beyond the scale of {self.name}, {to}: {_EDGES[self.edge][1]}."


def _make_front_axis(
    evaluations: Sequence[Evaluation], objectives: Objectives, index: int, box: ReferenceBox | None
) -> _FrontAxis:
    """Return the axis of an objective. Values far beyond the usual value, or far beyond `box`, are out of range."""
    name, values = objectives.names[index], [evaluation.values[index] for evaluation in evaluations]
    whole = LossScale(min(values), max(values))
    costs = [-value for value in values] if name in objectives.maximized else values
    scale = _limit_scale(
        make_loss_scale(costs, costs), costs, float(box.reference[index]) if box else math.inf
    )
    if name not in objectives.maximized:
        return _FrontAxis(name, index, scale, "upper" if index else "right")
    if not whole.is_logarithmic and (scale.is_logarithmic or scale.is_out_of_range(max(costs))):
        return _FrontAxis(name, index, scale, "lower", is_reversed=True)
    return _FrontAxis(name, index, whole, "lower")


def _limit_scale(scale: LossScale, costs: Sequence[float], reference: float) -> LossScale:
    """Shorten a scale, if necessary, so that the values up to `reference` fill at least a quarter of it."""
    if scale.is_out_of_range(reference) or scale.compute_fraction(reference) >= _MIN_FRONT_FRACTION:
        return scale
    end = scale.compute_loss(scale.compute_fraction(reference) / _MIN_FRONT_FRACTION)
    return LossScale(scale.lowest, max(cost for cost in costs if cost <= end))


def draw_fronts(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Figure]:
    """Return a figure of the Pareto front for each objective except the loss. The x axis shows the loss."""
    complete = _find_complete(evaluations, objectives)
    if not complete or not objectives.is_multi_objective:
        return []
    groups, box = _group_by_progress(evaluations, objectives), make_box(complete, objectives)
    across, *others = [
        _make_front_axis(complete, objectives, index, box) for index in range(len(objectives.names))
    ]
    return [_draw_front(complete, groups, objectives, (across, up)) for up in others]


def _find_complete(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    """Return the complete evaluations whose objectives are all finite."""
    complete = [evaluation for evaluation in evaluations if evaluation.state == "complete"]
    return [
        evaluation
        for evaluation in complete
        if all(map(math.isfinite, objectives.compute_costs(evaluation.values)))
    ]


def _group_by_progress(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> dict[str, list[Evaluation]]:
    """Return the complete evaluations at three times: after a quarter of the run, after half of it, and now."""
    given, ended = (
        [evaluation for evaluation in evaluations if evaluation.imported_from],
        sort_by_end(evaluations),
    )
    counts = (len(ended) // 4, len(ended) // 2) if len(ended) >= _MIN_EVALUATIONS else ()
    before = {
        f"after {count} evaluations": _find_complete([*given, *ended[:count]], objectives)
        for count in counts
    }
    return {**before, "front": _find_complete(evaluations, objectives)}


def _draw_front(
    complete: Sequence[Evaluation],
    groups: Mapping[str, Sequence[Evaluation]],
    objectives: Objectives,
    sides: tuple[_FrontAxis, _FrontAxis],
) -> Figure:
    best = find_front(complete, objectives)
    across, up = sides
    on_front = {evaluation.trial for evaluation in best}
    others = sample_evaluations(
        [evaluation for evaluation in complete if evaluation.trial not in on_front]
    )
    look, accent = (
        {"color": "--muted", "size": 6, "opacity": 0.6},
        {"color": "--accent", "size": 8, "opacity": 1},
    )
    traces = [_draw_points(others, (across, up), objectives, "dominated", look)] if others else []
    traces += _draw_stairs(groups, (across, up), objectives)
    traces.append(
        _draw_points(sample_evaluations(best), (across, up), objectives, "on the front", accent)
    )
    layout, shapes = {}, []
    for which, side in (("x", across), ("y", up)):
        cut = any(map(side.is_out_of_range, complete))
        title = f"{side.name} (maximised)" if side.name in objectives.maximized else side.name
        layout[f"{which}axis"] = side.make_layout(cut, title)
        shapes += (
            [make_separator(which, side.scale.compute_loss(SEPARATOR_POSITION))] if cut else []
        )
    out_of_range_note = " ".join(
        filter(None, (side.describe_out_of_range(complete) for side in (across, up)))
    )
    description = _describe_figure(objectives, up.name, len(groups) > 1)
    title = f"{up.name} over the loss"
    return Figure(
        f"front-{up.index}",
        title,
        description,
        traces,
        {**layout, "shapes": shapes},
        height=420,
        out_of_range_note=out_of_range_note,
    )


def _describe_figure(objectives: Objectives, name: str, has_past: bool) -> str:
    text = "Each point is a complete evaluation. The line is the front"
    if len(objectives.names) > 2:
        text += f" of loss and {name} alone; other individuals of the front are better in another objective"
    return text + (". Thinner lines are earlier fronts." if has_past else ".")


def _draw_points(
    evaluations: Sequence[Evaluation],
    sides: tuple[_FrontAxis, _FrontAxis],
    objectives: Objectives,
    name: str,
    look: dict[str, Any],
) -> Trace:
    """Draw evaluations as points, and out-of-range ones as triangles at the edges.

    Triangles come last, because the legend shows the first symbol.
    """
    across, up = sides
    evaluations = sorted(
        evaluations, key=lambda evaluation: any(side.is_out_of_range(evaluation) for side in sides)
    )
    edges = [
        next((side.edge for side in sides if side.is_out_of_range(evaluation)), "")
        for evaluation in evaluations
    ]
    marker = {**look, "symbol": [_EDGES[edge][0] if edge else "circle" for edge in edges]}
    marker |= {
        "size": [TRIANGLE_SIZE if edge else look["size"] for edge in edges],
        "line": {"width": 0},
    }
    trace = make_points(across.compute_heights(evaluations), evaluations, name)
    texts = [_format_front_label(evaluation, objectives) for evaluation in evaluations]
    return {**trace, "y": up.compute_heights(evaluations), "text": texts, "marker": marker}


def _format_front_label(evaluation: Evaluation, objectives: Objectives) -> str:
    """Return the label of an evaluation, with the values of all objectives."""
    first, rest = format_label(evaluation).split("<br>", 1)
    others = zip(objectives.metric_names, evaluation.other_values, strict=True)
    return "<br>".join(
        [first, *(escape_markup(f"{name} {format_number(value)}") for name, value in others), rest]
    )


def _draw_stairs(
    groups: Mapping[str, Sequence[Evaluation]],
    sides: tuple[_FrontAxis, _FrontAxis],
    objectives: Objectives,
) -> list[Trace]:
    """Draw a stepped line along the front of each group. The latest front has the strongest colour."""
    across, up = sides
    looks = (("--muted", 1, "dot"), ("--accent-soft", 1.5, "solid"), ("--accent", 2, "solid"))[
        -len(groups) :
    ]
    traces: list[Trace] = []
    for (name, group), (colour, width, dash) in zip(groups.items(), looks, strict=True):
        stairs = _find_stairs(group, objectives, up.index)
        # The area that an evaluation dominates extends from it to the right and upwards.
        line = {"color": colour, "width": width, "dash": dash, "shape": "hv"}
        index = {"x": across.compute_heights(stairs), "y": up.compute_heights(stairs)}
        traces.append({**index, "name": name, "mode": "lines", "line": line, "hoverinfo": "skip"})
    return traces


def _find_stairs(
    evaluations: Sequence[Evaluation], objectives: Objectives, index: int
) -> list[Evaluation]:
    """Return the evaluations that are not dominated in the loss and objective number `index`, sorted by loss."""
    costs = compute_costs(evaluations, objectives)[:, [0, index]]
    kept = [
        evaluation
        for evaluation, is_kept in zip(evaluations, find_non_dominated(costs), strict=True)
        if is_kept
    ]
    return sorted(kept, key=lambda evaluation: evaluation.loss)


def draw_hypervolume(evaluations: Sequence[Evaluation], objectives: Objectives) -> Figure | None:
    """Draw how the hypervolume grows during the run.

    Return None if it cannot be computed, or if fewer than two evaluations have ended.
    """
    grown, ended = compute_shares_over_time(evaluations, objectives), len(sort_by_end(evaluations))
    if not grown or ended < 2:
        return None
    x, y = [count for count, _ in grown], [round(share, 4) for _, share in grown]
    line = {"color": "--accent", "width": 2, "shape": "hv"}
    trace = {
        "x": [*x, ended],
        "y": [*y, y[-1]],
        "mode": "lines",
        "line": line,
        "name": "hypervolume",
    }
    trace["hovertemplate"] = "after %{x} evaluations: %{y:.1%}<extra></extra>"
    layout = {
        "xaxis": make_axis("evaluations that have ended"),
        "yaxis": {**make_axis("share of the box"), "tickformat": ".0%", "rangemode": "tozero"},
        "showlegend": False,
    }
    description = "The part of the box between the best and the worst values of the front that the front dominates."
    return Figure("hypervolume", "Hypervolume", description, [trace], layout, height=280)
