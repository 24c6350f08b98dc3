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
    own = [one for one in evaluations if not one.imported_from and math.isfinite(one.started)]
    if not own:
        return None
    zone = _compute_utc_offset(own[0].started)
    traces: list[Trace] = []
    for state, colour, _ in STATE_MARKERS:
        group = [one for one in own if one.state == state]
        if not group:
            continue
        spans = [(one.started + zone, compute_end(one, now) + zone) for one in group]
        x, y = join_lines(([1000 * a, 1000 * b], [one.worker] * 2) for one, (a, b) in zip(group, spans, strict=True))
        x = [None if item is None else round(item) for item in x]
        texts = [text for one in group for text in [_format_label(one)] * 2 + [None]]
        line = {"color": "--good" if state == "complete" else colour, "width": 11}
        traces.append({"x": x, "y": y, "text": texts, "name": state, "mode": "lines", "line": line})
        traces[-1]["hovertemplate"] = "%{text}<extra></extra>"
    traces += _draw_helpers(own, zone, now)
    there = {one.worker for one in own}.union(*(team["workers"] for one in own for team in one.worker_groups))
    lanes = max(workers, 1 + max(there))
    layout = {
        "xaxis": {"type": "date", "rangebreaks": _find_pauses(WorkingTime(own, now), zone)},
        "yaxis": {
            "title": {"text": "worker"},
            "range": [lanes - 0.4, -0.6],
            "dtick": max(1, lanes // 32),
            "zeroline": False,
            "showgrid": False,
        },
        "hovermode": "closest",
    }
    about = "A bar is an evaluation, a thin one a worker that helps another; a gap is a worker that waits."
    about += " Pauses between sessions are left out."
    return Figure("timeline", "Timeline", about, traces, layout, height=max(_MIN_HEIGHT, 110 + 18 * min(lanes, 64)))


def _draw_helpers(evaluations: Sequence[Evaluation], zone: float, now: float | None) -> list[Trace]:
    """Draw who helped others with their evaluations, with thin bars; nothing where nobody did."""
    parts = [(one, part) for one in evaluations for part in find_help_periods(one, compute_end(one, now))]
    if not parts:
        return []
    x, y = join_lines(([1000 * (p.start + zone), 1000 * (p.stop + zone)], [p.worker] * 2) for _, p in parts)
    about = [
        f"helps worker {one.worker} with trial {one.label}, after {format_count(p.from_step, 'epoch')}"
        for one, p in parts
    ]
    return [
        {
            "x": [None if item is None else round(item) for item in x],
            "y": y,
            "text": [text for one in about for text in (one, one, None)],
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


def _find_pauses(time: WorkingTime, zone: float) -> list[dict[str, Any]]:
    """Return the times in which no worker did anything, if they are longer than an idle worker explains."""
    longest = max(60.0, (time.spans[-1][1] - time.spans[0][0]) / 50)
    between = [(end, start) for (_, end), (start, _) in pairwise(time.spans) if start - end > longest]
    return [{"bounds": [round(1000 * (at + zone)) for at in (end + 1, start - 1)]} for end, start in between]


def draw_immigrants(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw how many individuals of other islands lived on each island; None where there never were any."""
    began = [one for one in evaluations if not one.imported_from and one.propagator and math.isfinite(one.started)]
    if not any(one.immigrants for one in began):
        return None
    traces: list[Trace] = []
    for island in sorted({one.island for one in began}):
        group = [one for one in began if one.island == island]
        line = {"color": find_island_colour(island), "shape": "hv", "width": 2}
        counts = [sum(one.immigrants.values()) for one in group]
        trials = [one.trial for one in group]
        traces.append({"x": trials, "y": counts, "name": f"island {island}", "mode": "lines", "line": line})
    highest = [max(trace["y"]) for trace in traces]
    layout = {
        "xaxis": make_axis("trial"),
        "yaxis": {**make_axis("immigrants", highest, whole=True), "rangemode": "tozero"},
    }
    about = "How many individuals that other islands bred lived on an island when it began an evaluation."
    return Figure("immigrants", "Exchange between islands", about, traces, layout, height=300)
