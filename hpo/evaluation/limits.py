"""Limits of evaluations and of the run, and messages about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import ExitStatus, StopRequest
from hpo.store.evaluations import Evaluation, find_best


@dataclass(frozen=True)
class Limits:
    """When an evaluation, or the whole run, must end."""

    evaluation_timeout: float = math.inf
    """Maximum seconds of an evaluation."""
    max_failures: int | None = None
    """Number of failed evaluations after which the run stops if none has succeeded; None for no limit."""
    target_loss: float = -math.inf
    """The run stops when the loss of an evaluation is at most this value."""
    has_pruner: bool = False
    """Whether a pruner decides on each loss."""
    first_judged_step: int = 1
    """Index of the first step on which the pruner decides; steps count from 1."""


def make_target_stop(target_loss: float) -> StopRequest:
    """Return the request to stop a run that has reached its target loss."""
    reason = f"the loss of --target-loss {target_loss:g} is reached"
    return StopRequest(reason, ExitStatus.BUDGET_SPENT, "a lower --target-loss, or --target-loss off")


def find_target_stop(evaluations: Sequence[Evaluation], target_loss: float) -> StopRequest | None:
    """Return the request to stop a search, if its evaluations have reached the target loss."""
    best = find_best(evaluations)
    return make_target_stop(target_loss) if best is not None and best.loss <= target_loss else None


def describe_missing_metric(missing: Sequence[str], metrics: Mapping[str, float]) -> str:
    """Return the failure message of an evaluation that has not reported a metric that is an objective.

    Args:
        missing: Names of the missing metrics.
        metrics: Metrics that the first rank has reported.
    """
    reported = ", ".join(map(repr, metrics)) or "no finite metric"
    return (
        f"{missing[0]!r} must be a finite number, since it is an objective, but the first rank reported {reported}. "
        f"Report it with each loss, as in yield loss, {{{missing[0]!r}: ...}}"
    )
