"""Draw the Pareto front: evaluations, the front, earlier fronts, and the hypervolume over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from hpo.dominance import find_non_dominated
from hpo.objectives import Objectives
from hpo.results.hypervolume import ReferenceBox, compute_shares_over_time, make_box
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.pareto_front import compute_costs, find_front
from hpo.text_format import format_count, format_number
from hpo.views.loss_scale import LossScale, make_loss_scale
from hpo.views.page.figure import (
    TRIANGLE_SIZE,
    Figure,
    Trace,
    compute_heights,
    compute_linear_ticks,
    escape_markup,
    format_label,
    make_axis,
    make_cut_axis,
    make_line,
    make_points,
    make_separator,
    sample_evaluations,
)

_MIN_EVALUATIONS = 8  # Runs with fewer evaluations have no earlier fronts.
# Of an axis, for the range from the best value to the reference point of the front.
_MIN_FRONT_FRACTION = 1 / 4
_EDGES = {
    "right": ("triangle-right", "\N{BLACK RIGHT-POINTING TRIANGLE} at the right edge"),
    "upper": ("triangle-up", "\N{BLACK UP-POINTING TRIANGLE} at the upper edge"),
    "lower": ("triangle-down", "\N{BLACK DOWN-POINTING TRIANGLE} at the lower edge"),
}
# Colours, widths and dashes of the lines along fronts, the latest front last.
_STAIR_LOOKS = (("--muted", 1, "dot"), ("--accent-soft", 1.5, "solid"), ("--accent", 2, "solid"))


@dataclass(frozen=True)
class _FrontAxis:
    """The axis of a figure that shows the objective `name`, which has the index `index`."""

    name: str
    index: int
    is_maximized: bool
    scale: LossScale
    """Scale of the values, or of the negated values if `is_reversed`."""
    edge: str
    """Key in _EDGES of the edge where out-of-range values are drawn."""
    is_reversed: bool = False
    """Whether `scale` has negated values, so that the axis must be drawn in reverse."""

    def compute_heights(self, evaluations: Sequence[Evaluation]) -> list[float]:
        """Return the positions of evaluations on the axis."""
        return compute_heights(map(self._compute_value, evaluations), self.scale)

    def is_out_of_range(self, evaluation: Evaluation) -> bool:
        """Return whether an evaluation is beyond the scale."""
        return self.scale.is_out_of_range(self._compute_value(evaluation))

    def _compute_value(self, evaluation: Evaluation) -> float:
        value = evaluation.values[self.index]
        return -value if self.is_reversed else value

    def make_layout(self, is_cut: bool) -> dict[str, Any]:
        """Return the axis for plotly, with space for out-of-range values if `is_cut`."""
        title = f"{self.name} (maximised)" if self.is_maximized else self.name
        axis = make_cut_axis(title, self.scale, is_cut)
        if not self.is_reversed:
            return axis
        between = compute_linear_ticks(self.scale.lowest, self.scale.highest)
        ticks = axis.get("tickvals", between)
        axis |= {"tickvals": ticks, "ticktext": [f"{-tick or 0.0:.8g}" for tick in ticks]}
        return axis | ({"range": axis["range"][::-1]} if is_cut else {"autorange": "reversed"})

    def describe_out_of_range(self, evaluations: Sequence[Evaluation]) -> str:
        """Return a sentence with the number of evaluations beyond the scale; "" without any."""
        far = [e.values[self.index] for e in evaluations if self.is_out_of_range(e)]
        if not far:
            return ""
        count = format_count(len(far), "evaluation")
        verb = "goes" if len(far) == 1 else "go"
        end = f"up to {format_number(max(far))}"
        if self.is_reversed:
            end = f"down to {format_number(min(far))}"
        return f"{count} {verb} beyond the scale of {self.name}, {end}: {_EDGES[self.edge][1]}."


def _make_front_axis(
    evaluations: Sequence[Evaluation], objectives: Objectives, index: int, box: ReferenceBox | None
) -> _FrontAxis:
    """Return the axis of an objective. Values far beyond the usual one or `box` are cut off."""
    name = objectives.names[index]
    values = [evaluation.values[index] for evaluation in evaluations]
    whole = LossScale(min(values), max(values))
    is_maximized = name in objectives.maximized
    costs = [-value for value in values] if is_maximized else values
    reference = float(box.reference[index]) if box else math.inf
    scale = make_loss_scale(costs, costs)
    if not scale.is_out_of_range(reference):
        end = scale.compute_fraction(reference) / _MIN_FRONT_FRACTION
        if end < 1:
            highest = max(cost for cost in costs if cost <= scale.compute_loss(end))
            scale = LossScale(scale.lowest, highest)
    if not is_maximized:
        return _FrontAxis(name, index, False, scale, "upper" if index else "right")
    if not whole.is_logarithmic and (scale.is_logarithmic or scale.is_out_of_range(max(costs))):
        return _FrontAxis(name, index, True, scale, "lower", is_reversed=True)
    return _FrontAxis(name, index, True, whole, "lower")


def draw_fronts(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Figure]:
    """Return a figure of the Pareto front for each objective except the loss, over the loss."""
    complete = _find_complete(evaluations, objectives)
    if not complete or not objectives.is_multi_objective:
        return []
    groups = _group_by_progress(evaluations, objectives)
    box = make_box(complete, objectives)
    across, *others = [
        _make_front_axis(complete, objectives, index, box) for index in range(len(objectives.names))
    ]
    return [_FrontFigure(objectives, across, up).draw(complete, groups) for up in others]


def _find_complete(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[Evaluation]:
    return [
        e
        for e in evaluations
        if e.state == "complete" and all(map(math.isfinite, objectives.compute_costs(e.values)))
    ]


def _group_by_progress(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> dict[str, list[Evaluation]]:
    """Return the complete evaluations after a quarter of the run, after half of it, and now."""
    imported = [evaluation for evaluation in evaluations if evaluation.imported_from]
    ended = sort_by_end(evaluations)
    groups = {}
    if len(ended) >= _MIN_EVALUATIONS:
        for count in (len(ended) // 4, len(ended) // 2):
            known = [*imported, *ended[:count]]
            groups[f"after {count} evaluations"] = _find_complete(known, objectives)
    return {**groups, "front": _find_complete(evaluations, objectives)}


@dataclass(frozen=True)
class _FrontFigure:
    """A figure of the Pareto front, with the loss on the axis `across`."""

    objectives: Objectives
    across: _FrontAxis
    up: _FrontAxis

    def draw(
        self, complete: Sequence[Evaluation], groups: Mapping[str, Sequence[Evaluation]]
    ) -> Figure:
        """Return the figure of all complete evaluations, and the fronts of `groups` by name."""
        best = find_front(complete, self.objectives)
        on_front = {evaluation.trial for evaluation in best}
        others = [evaluation for evaluation in complete if evaluation.trial not in on_front]
        muted = {"color": "--muted", "size": 6, "opacity": 0.6}
        accent = {"color": "--accent", "size": 8, "opacity": 1}
        traces = [self._draw_points(others, "dominated", muted)] if others else []
        traces += self._draw_stairs(groups)
        traces.append(self._draw_points(best, "on the front", accent))
        layout: dict[str, Any] = {"shapes": []}
        for letter, axis in (("x", self.across), ("y", self.up)):
            is_cut = any(map(axis.is_out_of_range, complete))
            layout[f"{letter}axis"] = axis.make_layout(is_cut)
            if is_cut:
                layout["shapes"].append(make_separator(letter, axis.scale))
        notes = [axis.describe_out_of_range(complete) for axis in (self.across, self.up)]
        description = "Each point is a complete evaluation. The line is the front"
        if len(self.objectives.names) > 2:
            description += (
                f" of loss and {self.up.name} alone; "
                "other individuals of the front are better in another objective"
            )
        past = " Thinner lines are earlier fronts." if len(groups) > 1 else ""
        return Figure(
            f"front-{self.up.index}",
            f"{self.up.name} over the loss",
            f"{description}.{past}",
            traces,
            layout,
            height=420,
            out_of_range_note=" ".join(filter(None, notes)),
        )

    def _draw_points(
        self, evaluations: Sequence[Evaluation], name: str, marker: dict[str, Any]
    ) -> Trace:
        """Draw evaluations as points, and out-of-range ones as triangles at the edges."""
        edges = {}
        evaluations = sample_evaluations(evaluations)
        for evaluation in evaluations:
            far = [axis for axis in (self.across, self.up) if axis.is_out_of_range(evaluation)]
            edges[evaluation.trial] = far[0].edge if far else ""
        # Triangles come last, because the legend shows the first symbol.
        evaluations.sort(key=lambda evaluation: bool(edges[evaluation.trial]))
        own = [edges[evaluation.trial] for evaluation in evaluations]
        return {
            **make_points(self.across.compute_heights(evaluations), evaluations, name),
            "y": self.up.compute_heights(evaluations),
            "text": list(map(self._format_label, evaluations)),
            "marker": {
                **marker,
                "symbol": [_EDGES[edge][0] if edge else "circle" for edge in own],
                "size": [TRIANGLE_SIZE if edge else marker["size"] for edge in own],
                "line": {"width": 0},
            },
        }

    def _format_label(self, evaluation: Evaluation) -> str:
        first, rest = format_label(evaluation).split("<br>", 1)
        others = zip(self.objectives.metric_names, evaluation.other_values, strict=True)
        texts = [escape_markup(f"{name} {format_number(value)}") for name, value in others]
        return "<br>".join([first, *texts, rest])

    def _draw_stairs(self, groups: Mapping[str, Sequence[Evaluation]]) -> list[Trace]:
        looks = _STAIR_LOOKS[-len(groups) :]
        traces = []
        for (name, group), (colour, width, dash) in zip(groups.items(), looks, strict=True):
            # Evaluations that are not dominated in the two objectives, sorted by loss.
            costs = compute_costs(group, self.objectives)[:, [0, self.up.index]]
            stairs = list(compress(group, find_non_dominated(costs)))
            stairs.sort(key=lambda evaluation: evaluation.loss)
            x = self.across.compute_heights(stairs)
            y = self.up.compute_heights(stairs)
            # The area that an evaluation dominates extends from it to the right and upwards.
            line = {"color": colour, "width": width, "dash": dash, "shape": "hv"}
            traces.append(make_line(x, y, line, name=name))
        return traces


def draw_hypervolume(evaluations: Sequence[Evaluation], objectives: Objectives) -> Figure | None:
    """Draw how the hypervolume grows; None without a box, or if fewer than two have ended."""
    shares = compute_shares_over_time(evaluations, objectives)
    ended = len(sort_by_end(evaluations))
    if not shares or ended < 2:
        return None
    shares = [*shares, (ended, shares[-1][1])]
    trace = {
        "x": [count for count, _ in shares],
        "y": [round(share, 4) for _, share in shares],
        "mode": "lines",
        "line": {"color": "--accent", "width": 2, "shape": "hv"},
        "name": "hypervolume",
        "hovertemplate": "after %{x} evaluations: %{y:.1%}<extra></extra>",
    }
    layout = {
        "xaxis": make_axis("evaluations that have ended"),
        "yaxis": {**make_axis("share of the box"), "tickformat": ".0%", "rangemode": "tozero"},
        "showlegend": False,
    }
    description = (
        "The part of the box between the best and the worst values of the front "
        "that the front dominates."
    )
    return Figure("hypervolume", "Hypervolume", description, [trace], layout, height=280)
