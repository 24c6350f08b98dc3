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
    evaluation, log_end = details.evaluation, details.log_end
    has_started = evaluation.state != "waiting"
    is_bred = has_started and not evaluation.imported_from and evaluation.confirms is None
    content = {
        "study": details.study,
        "trial": evaluation.trial,
        "label": evaluation.label,
        "state": evaluation.state,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "metrics": evaluation.metrics,
        "island": evaluation.island if has_started else None,
        "worker": evaluation.worker if has_started else None,
        "generation": evaluation.generation if is_bred else None,
        "propagator": evaluation.propagator or None,
        "immigrants": dict(evaluation.immigrants),
        "seed": details.seed,
        "imported_from": evaluation.imported_from or None,
        "confirms": evaluation.confirms,
        "confirmed_by": [confirmation.label for confirmation in details.confirmed_by],
        "inherits": evaluation.inherits,
        "retry_of": evaluation.retry_of,
        "retried_by": details.retried_by,
        "crash_count": evaluation.crash_count,
        "resumed_from_step": evaluation.resumed_from_step or None,
        "checkpoint_step": evaluation.checkpoint_step or None,
        "paused_after": evaluation.paused_after or None,
        "cut_after": evaluation.cut_after or None,
        "worker_groups": [{**group, "at": _format_time(group["at"])} for group in evaluation.worker_groups],
        "started": _format_time(evaluation.started),
        "ended": _format_time(evaluation.ended),
        "seconds": evaluation.seconds if evaluation.has_ended else None,
        "epochs": max(evaluation.curve, default=0),
        "losses": {str(epoch): evaluation.curve[epoch] for epoch in sorted(evaluation.curve)},
        "failure": evaluation.failure if evaluation.state == "failed" else None,
        "traceback": evaluation.traceback or None,
        "logs": log_end and {"path": str(log_end.path), "before": log_end.lines_before, "lines": log_end.lines},
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
