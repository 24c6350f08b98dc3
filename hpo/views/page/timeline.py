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
from hpo.views.page.figure import (
    STATE_MARKERS,
    Figure,
    Trace,
    find_island_colour,
    join_lines,
    make_line,
)
from hpo.views.times import WorkingTime, compute_end

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
    started = _find_started(evaluations)
    if not started:
        return None
    utc_offset = _compute_utc_offset(started[0].started)
    traces: list[Trace] = []
    for state, colour, _ in STATE_MARKERS:
        group = [evaluation for evaluation in started if evaluation.state == state]
        if group:
            colour = "--good" if state == "complete" else colour
            traces.append(_draw_bars(group, now, utc_offset, {"color": colour, "width": 11}))
            traces[-1]["name"] = state
    lanes = max(workers, 1 + max(evaluation.worker for evaluation in started))
    pauses = _find_pauses(WorkingTime(started, now), utc_offset)
    layout = {
        "xaxis": {"type": "date", "rangebreaks": pauses},
        "yaxis": {
            "title": {"text": "worker"},
            "range": [lanes - 0.4, -0.6],
            "dtick": max(1, lanes // 32),
            "zeroline": False,
            "showgrid": False,
        },
        "hovermode": "closest",
    }
    description = (
        "A bar is an evaluation, and a gap is a waiting worker. "
        "Pauses between sessions are not shown."
    )
    height = max(_MIN_HEIGHT, 110 + 18 * min(lanes, 64))
    return Figure("timeline", "Timeline", description, traces, layout, height)


def _find_started(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations of this run that have started."""
    return [
        evaluation
        for evaluation in evaluations
        if not evaluation.imported_from and math.isfinite(evaluation.started)
    ]


def _draw_bars(
    group: Sequence[Evaluation], now: float | None, utc_offset: float, line: dict[str, Any]
) -> Trace:
    lines, texts = [], []
    for evaluation in group:
        ends = evaluation.started, compute_end(evaluation, now)
        milliseconds = [round(1000 * (end + utc_offset)) for end in ends]
        lines.append((milliseconds, [evaluation.worker] * 2))
        texts += [_format_label(evaluation)] * 2 + [None]
    return make_line(*join_lines(lines), line, texts)


def _format_label(evaluation: Evaluation) -> str:
    result = evaluation.state
    if math.isfinite(evaluation.loss):
        result = format_number(evaluation.loss)
    name = f"trial {evaluation.trial}"
    if evaluation.confirms is not None:
        name = f"confirms trial {evaluation.confirms}"
    return f"{name}: {result}, {format_duration(evaluation.seconds)}"


def _compute_utc_offset(at: float) -> float:
    """Return the offset of local time from UTC in seconds, since plotly has no time zones."""
    offset = datetime.fromtimestamp(at).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0


def _find_pauses(time: WorkingTime, utc_offset: float) -> list[dict[str, Any]]:
    """Return plotly range breaks for long periods without any evaluation."""
    longest = max(60.0, (time.spans[-1][1] - time.spans[0][0]) / 50)
    pauses = [(end, start) for (_, end), (start, _) in pairwise(time.spans)]
    return [
        {"bounds": [round(1000 * (at + utc_offset)) for at in (end + 1, start - 1)]}
        for end, start in pauses
        if start - end > longest
    ]


def draw_immigrants(evaluations: Sequence[Evaluation]) -> Figure | None:
    """Draw the number of immigrants (individuals from other islands) on each island, if any."""
    bred = [evaluation for evaluation in _find_started(evaluations) if evaluation.propagator]
    if not any(evaluation.immigrants for evaluation in bred):
        return None
    traces: list[Trace] = []
    for island in sorted({evaluation.island for evaluation in bred}):
        group = [evaluation for evaluation in bred if evaluation.island == island]
        traces.append(
            {
                "x": [evaluation.trial for evaluation in group],
                "y": [sum(evaluation.immigrants.values()) for evaluation in group],
                "name": f"island {island}",
                "mode": "lines",
                "line": {"color": find_island_colour(island), "shape": "hv", "width": 2},
            }
        )
    highest = [max(trace["y"]) for trace in traces]
    upright = {**make_axis("immigrants", highest, whole=True), "rangemode": "tozero"}
    layout = {"xaxis": make_axis("trial"), "yaxis": upright}
    description = (
        "The number of individuals from other islands on an island when it began an evaluation."
    )
    return Figure("immigrants", "Exchange between islands", description, traces, layout, height=300)
