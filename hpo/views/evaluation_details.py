"""Everything that is known of one evaluation, also as JSON for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.store.output_log import LogTail
from hpo.text_format import escape_unencodable


@dataclass(frozen=True)
class EvaluationDetails:
    """One evaluation, and what is known of it beside its trial.

    `in_use` tells whether its run goes on, None where this cannot be told from this host; `seed` is what it was trained
    with, None where another run has done that; `retried_by` is the trial that evaluates it again, if it was
    interrupted or promoted, and `retried_state` what became of the one that it repeats; `confirmed_by` are those that
    train it with other seeds. `front` tells whether it is on the front, None where the loss is the only objective, and
    `better` is a trial of the front that dominates it, or is its equal, if there is one.
    """

    evaluation: Evaluation
    study: str
    in_use: bool | None
    seed: int | None
    retried_by: int | None
    retried_state: str
    confirmed_by: list[Evaluation]
    log_end: LogTail | None
    is_on_front: bool | None = None
    dominated_by: int | None = None


def make_json_content(details: EvaluationDetails) -> dict[str, Any]:
    """Return everything about an evaluation as JSON can hold it, null where there is nothing."""
    one, printed = details.evaluation, details.log_end
    placed = one.state != "waiting"
    bred = placed and not one.imported_from and one.confirms is None
    content = {
        "study": details.study,
        "trial": one.trial,
        "label": one.label,
        "state": one.state,
        "loss": one.loss,
        "params": one.params,
        "metrics": one.metrics,
        "island": one.island if placed else None,
        "worker": one.worker if placed else None,
        "generation": one.generation if bred else None,
        "propagator": one.propagator or None,
        "immigrants": dict(one.immigrants),
        "seed": details.seed,
        "imported_from": one.imported_from or None,
        "confirms": one.confirms,
        "confirmed_by": [other.label for other in details.confirmed_by],
        "inherits": one.inherits,
        "retry_of": one.retry_of,
        "retried_by": details.retried_by,
        "crash_count": one.crash_count,
        "resumed_from_step": one.resumed_from_step or None,
        "checkpoint_step": one.checkpoint_step or None,
        "paused_after": one.paused_after or None,
        "cut_after": one.cut_after or None,
        "worker_groups": [{**team, "at": _format_time(team["at"])} for team in one.worker_groups],
        "started": _format_time(one.started),
        "ended": _format_time(one.ended),
        "seconds": one.seconds if one.has_ended else None,
        "epochs": max(one.curve, default=0),
        "losses": {str(epoch): one.curve[epoch] for epoch in sorted(one.curve)},
        "failure": one.failure if one.state == "failed" else None,
        "traceback": one.traceback or None,
        "logs": printed and {"path": str(printed.path), "before": printed.lines_before, "lines": printed.lines},
    }
    if details.is_on_front is not None:
        content["front"] = details.is_on_front
    return {name: _make_json_value(value) for name, value in content.items()}


def _format_time(seconds: float) -> str | None:
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")


def _make_json_value(value: Any) -> Any:
    """Return a value as JSON can hold it: None for NaN and infinity, and texts with what UTF-8 lacks escaped."""
    if isinstance(value, dict):
        return {_make_json_value(name): _make_json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return escape_unencodable(value) if isinstance(value, str) else value
