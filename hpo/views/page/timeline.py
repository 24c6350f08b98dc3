"""Draw what each worker did over time, and the exchange between islands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.text_format import format_duration, format_number
from hpo.views.page.axes import make_axis
from hpo.views.page.figure import STATE_MARKERS, Figure, Trace, find_island_colour, join_lines
from hpo.views.working_time import WorkingTime, compute_end

# Pixels; has space for a legend of five rows, because Plotly keeps at least 64 pixels for the axes.
_MIN_HEIGHT = 220


def draw_timeline(
    evaluations: Sequence[Evaluation], workers: int, now: float | None
) -> Figure | None:
    """Draw the evaluations of each worker over time; None if no evaluation has started.

    Args:
        evaluations: Evaluations of the search and its confirmation.
        workers: Number of workers in the layout.
        now: Time until which running evaluations are drawn, in seconds since the epoch; None if the
            run is not active.
    """
    own = [
        evaluation
        for evaluation in evaluations
        if not evaluation.imported_from and math.isfinite(evaluation.started)
    ]
    if not own:
        return None
    utc_offset = _compute_utc_offset(own[0].started)
    traces: list[Trace] = []
    for state, colour, _ in STATE_MARKERS:
        group = [evaluation for evaluation in own if evaluation.state == state]
        if not group:
            continue
        spans = [
            (evaluation.started + utc_offset, compute_end(evaluation, now) + utc_offset)
            for evaluation in group
        ]
        x, y = join_lines(
            ([1000 * a, 1000 * b], [evaluation.worker] * 2)
            for evaluation, (a, b) in zip(group, spans, strict=True)
        )
        x = [None if item is None else round(item) for item in x]
        texts = [text for evaluation in group for text in [_format_label(evaluation)] * 2 + [None]]
        line = {"color": "--good" if state == "complete" else colour, "width": 11}
        traces.append({"x": x, "y": y, "text": texts, "name": state, "mode": "lines", "line": line})
        traces[-1]["hovertemplate"] = "%{text}<extra></extra>"
    lanes = max(workers, 1 + max(evaluation.worker for evaluation in own))
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
    description = "A bar is an evaluation, and a gap is a waiting worker. Pauses between sessions are not shown."
    return Figure(
        "timeline",
        "Timeline",
        description,
        traces,
        layout,
        height=max(_MIN_HEIGHT, 110 + 18 * min(lanes, 64)),
    )


def _format_label(evaluation: Evaluation) -> str:
    how = format_number(evaluation.loss) if math.isfinite(evaluation.loss) else evaluation.state
    what = (
        f"trial {evaluation.trial}"
        if evaluation.confirms is None
        else f"confirms trial {evaluation.confirms}"
    )
    return f"{what}: {how}, {format_duration(evaluation.seconds)}"


def _compute_utc_offset(at: float) -> float:
    """Return the offset of local time from UTC in seconds. It is added to all times, since plotly has no time zones."""
    offset = datetime.fromtimestamp(at).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0


def _find_pauses(time: WorkingTime, utc_offset: float) -> list[dict[str, Any]]:
    """Return plotly range breaks for long periods without any evaluation, such as the pauses between sessions."""
    longest = max(60.0, (time.spans[-1][1] - time.spans[0][0]) / 50)
    between = [
        (end, start) for (_, end), (start, _) in pairwise(time.spans) if start - end > longest
    ]
    return [
        {"bounds": [round(1000 * (at + utc_offset)) for at in (end + 1, start - 1)]}
        for end, start in between
    ]


def draw_immigrants(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw the number of immigrants (individuals from other islands) on each island; None if there were none."""
    began = [
        evaluation
        for evaluation in evaluations
        if not evaluation.imported_from
        and evaluation.propagator
        and math.isfinite(evaluation.started)
    ]
    if not any(evaluation.immigrants for evaluation in began):
        return None
    traces: list[Trace] = []
    for island in sorted({evaluation.island for evaluation in began}):
        group = [evaluation for evaluation in began if evaluation.island == island]
        line = {"color": find_island_colour(island), "shape": "hv", "width": 2}
        counts = [sum(evaluation.immigrants.values()) for evaluation in group]
        trials = [evaluation.trial for evaluation in group]
        traces.append(
            {"x": trials, "y": counts, "name": f"island {island}", "mode": "lines", "line": line}
        )
    highest = [max(trace["y"]) for trace in traces]
    layout = {
        "xaxis": make_axis("trial"),
        "yaxis": {**make_axis("immigrants", highest, whole=True), "rangemode": "tozero"},
    }
    description = (
        "The number of individuals from other islands on an island when it began an evaluation."
    )
    return Figure("immigrants", "Exchange between islands", description, traces, layout, height=300)
