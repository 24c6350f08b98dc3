"""Limits of evaluations and of the run, and messages about them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.errors import ExitStatus, StopRequest
from hpo.store.evaluations import Evaluation, find_best
from hpo.store.search_gain import is_gain_below


@dataclass(frozen=True)
class Limits:
    """When an evaluation, or the whole run, must end."""

    evaluation_timeout: float = math.inf
    """Maximum seconds of an evaluation."""
    max_failures: int | None = None
    """Number of failed evaluations after which the run stops if none has succeeded; None for no limit."""
    target_loss: float = -math.inf
    """The run stops when the loss of an evaluation is at most this value."""
    stop_gain: float = -math.inf
    """The run stops when the next tenth of the budget is expected to reduce the lowest loss by a smaller share."""
    has_pruner: bool = False
    """Whether a pruner decides on each loss."""
    first_judged_step: int = 1
    """Index of the first step on which the pruner decides; steps count from 1."""


def make_target_stop(target_loss: float) -> StopRequest:
    """Return the request to stop a run that has reached its target loss."""
    reason = f"the loss of --target-loss {target_loss:g} is reached"
    return StopRequest(reason, ExitStatus.BUDGET_SPENT, "a lower --target-loss, or --target-loss off")


def make_gain_stop(stop_gain: float) -> StopRequest:
    """Return the request to stop a run whose next evaluations are expected to gain too little."""
    reason = f"the expected gain is less than --stop-gain {100 * stop_gain:g}%"
    return StopRequest(reason, ExitStatus.BUDGET_SPENT, "a lower --stop-gain, or --stop-gain off")


@dataclass(frozen=True)
class SearchGoal:
    """When a search is over before its budget is spent."""

    target_loss: float = -math.inf
    stop_gain: float = -math.inf
    budget: int = 0

    def list_stops(self) -> list[StopRequest]:
        """Return the requests to stop a search that has reached the target loss, or the least expected gain."""
        return [make_target_stop(self.target_loss), make_gain_stop(self.stop_gain)]

    def find_stop(self, evaluations: Sequence[Evaluation]) -> StopRequest | None:
        """Return the request to stop a search, if its evaluations have reached the goal."""
        best = find_best(evaluations)
        if best is not None and best.loss <= self.target_loss:
            return make_target_stop(self.target_loss)
        is_over = is_gain_below(self.stop_gain, evaluations, self.budget)
        return make_gain_stop(self.stop_gain) if is_over else None


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
