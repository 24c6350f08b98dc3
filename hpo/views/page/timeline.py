"""Figures of the work: what each worker did when, and what islands sent each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from hpo.store.elastic_candidates import find_help_periods
from hpo.store.evaluations import Evaluation
from hpo.text_format import format_count, format_duration, format_number
from hpo.views.page.axes import make_axis
from hpo.views.page.figure import STATE_MARKERS, Figure, Trace, find_island_colour, join_lines
from hpo.views.working_time import WorkingTime, compute_end

_MIN_HEIGHT = 220  # holds five rows of the legend, in a narrow window: Plotly never makes axes lower than 64 for it


def draw_timeline(evaluations: Sequence[Evaluation], workers: int, now: float | None) -> Figure | None:
    """Draw what each worker did when; running evaluations end at `now`, which is None if the run does not go on."""
    own = [
        evaluation for evaluation in evaluations if not evaluation.imported_from and math.isfinite(evaluation.started)
    ]
    if not own:
        return None
    utc_offset = _compute_utc_offset(own[0].started)
    traces: list[Trace] = []
    for state, colour, _ in STATE_MARKERS:
        group = [evaluation for evaluation in own if evaluation.state == state]
        if not group:
            continue
        spans = [(evaluation.started + utc_offset, compute_end(evaluation, now) + utc_offset) for evaluation in group]
        x, y = join_lines(
            ([1000 * a, 1000 * b], [evaluation.worker] * 2) for evaluation, (a, b) in zip(group, spans, strict=True)
        )
        x = [None if item is None else round(item) for item in x]
        texts = [text for evaluation in group for text in [_format_label(evaluation)] * 2 + [None]]
        line = {"color": "--good" if state == "complete" else colour, "width": 11}
        traces.append({"x": x, "y": y, "text": texts, "name": state, "mode": "lines", "line": line})
        traces[-1]["hovertemplate"] = "%{text}<extra></extra>"
    traces += _draw_helpers(own, utc_offset, now)
    seen_workers = {evaluation.worker for evaluation in own}.union(
        *(group["workers"] for evaluation in own for group in evaluation.worker_groups)
    )
    lanes = max(workers, 1 + max(seen_workers))
    layout = {
        "xaxis": {"type": "date", "rangebreaks": _find_pauses(WorkingTime(own, now), utc_offset)},
        "yaxis": {
            "title": {"text": "worker"},
            "range": [lanes - 0.4, -0.6],
            "dtick": max(1, lanes // 32),
            "zeroline": False,
            "showgrid": False,
        },
        "hovermode": "closest",
    }
    description = "A bar is an evaluation, a thin one a worker that helps another; a gap is a worker that waits."
    description += " Pauses between sessions are left out."
    return Figure(
        "timeline", "Timeline", description, traces, layout, height=max(_MIN_HEIGHT, 110 + 18 * min(lanes, 64))
    )


def _draw_helpers(evaluations: Sequence[Evaluation], utc_offset: float, now: float | None) -> list[Trace]:
    """Draw who helped others with their evaluations, with thin bars; empty if no worker did."""
    parts = [
        (evaluation, part)
        for evaluation in evaluations
        for part in find_help_periods(evaluation, compute_end(evaluation, now))
    ]
    if not parts:
        return []
    x, y = join_lines(
        ([1000 * (part.start + utc_offset), 1000 * (part.stop + utc_offset)], [part.worker] * 2) for _, part in parts
    )
    labels = [
        f"helps worker {evaluation.worker} with trial {evaluation.label}, after {format_count(part.from_step, 'epoch')}"
        for evaluation, part in parts
    ]
    return [
        {
            "x": [None if item is None else round(item) for item in x],
            "y": y,
            "text": [text for label in labels for text in (label, label, None)],
            "name": "helping",
            "mode": "lines",
            "line": {"color": "--island-2", "width": 5},
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]


def _format_label(evaluation: Evaluation) -> str:
    how = format_number(evaluation.loss) if math.isfinite(evaluation.loss) else evaluation.state
    what = f"trial {evaluation.trial}" if evaluation.confirms is None else f"confirms trial {evaluation.confirms}"
    return f"{what}: {how}, {format_duration(evaluation.seconds)}"


def _compute_utc_offset(at: float) -> float:
    """Return the seconds that local time was ahead of UTC: plotly shows dates as they are given."""
    offset = datetime.fromtimestamp(at).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0


def _find_pauses(time: WorkingTime, utc_offset: float) -> list[dict[str, Any]]:
    """Return the times in which no worker did anything, if they are longer than an idle worker explains."""
    longest = max(60.0, (time.spans[-1][1] - time.spans[0][0]) / 50)
    between = [(end, start) for (_, end), (start, _) in pairwise(time.spans) if start - end > longest]
    return [{"bounds": [round(1000 * (at + utc_offset)) for at in (end + 1, start - 1)]} for end, start in between]


def draw_immigrants(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw how many individuals of other islands lived on each island; None where there never were any."""
    began = [
        evaluation
        for evaluation in evaluations
        if not evaluation.imported_from and evaluation.propagator and math.isfinite(evaluation.started)
    ]
    if not any(evaluation.immigrants for evaluation in began):
        return None
    traces: list[Trace] = []
    for island in sorted({evaluation.island for evaluation in began}):
        group = [evaluation for evaluation in began if evaluation.island == island]
        line = {"color": find_island_colour(island), "shape": "hv", "width": 2}
        counts = [sum(evaluation.immigrants.values()) for evaluation in group]
        trials = [evaluation.trial for evaluation in group]
        traces.append({"x": trials, "y": counts, "name": f"island {island}", "mode": "lines", "line": line})
    highest = [max(trace["y"]) for trace in traces]
    layout = {
        "xaxis": make_axis("trial"),
        "yaxis": {**make_axis("immigrants", highest, whole=True), "rangemode": "tozero"},
    }
    description = "How many individuals that other islands bred lived on an island when it began an evaluation."
    return Figure("immigrants", "Exchange between islands", description, traces, layout, height=300)
