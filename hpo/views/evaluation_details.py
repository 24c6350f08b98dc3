"""Collect all facts about one evaluation, and convert them to JSON for other programs."""

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
    """All facts about one evaluation: from its record, from other evaluations of the run, and from its log file.

    Attributes:
        evaluation: The evaluation as recorded.
        study: Name of the study that contains it.
        in_use: Whether the run is active now; None if this host cannot see that.
        seed: Seed of the training; None if it is unknown, for example because another run has
            trained the evaluation.
        retried_by: Number of the later trial of the same individual, if this one was interrupted or
            promoted; otherwise None.
        retried_state: State of the previous trial of the same individual, such as "interrupted" or
            "promoted"; "" if this is the first trial.
        confirmed_by: Evaluations that train the same hyperparameters with other seeds.
        log_end: The final lines of its log file; None if no log file exists.
        is_on_front: Whether it is on the Pareto front; None if the loss is the only objective.
        dominated_by: A trial on the front that is as good or better in all objectives, if there is
            one.
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
    """Return all facts about an evaluation as a dictionary for `json.dumps`; unknown facts are None."""
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
        "started": _format_time(evaluation.started),
        "ended": _format_time(evaluation.ended),
        "seconds": evaluation.seconds if evaluation.has_ended else None,
        "epochs": max(evaluation.curve, default=0),
        "losses": {str(epoch): evaluation.curve[epoch] for epoch in sorted(evaluation.curve)},
        "failure": evaluation.failure if evaluation.state == "failed" else None,
        "traceback": evaluation.traceback or None,
        "logs": log_end
        and {"path": str(log_end.path), "before": log_end.lines_before, "lines": log_end.lines},
    }
    if details.is_on_front is not None:
        content["front"] = details.is_on_front
    return {name: _make_json_value(value) for name, value in content.items()}


def _format_time(seconds: float) -> str | None:
    if not math.isfinite(seconds):
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")


def _make_json_value(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity become None, and characters that UTF-8 cannot encode are escaped."""
    if isinstance(value, dict):
        return {_make_json_value(name): _make_json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return escape_unencodable(value) if isinstance(value, str) else value
