"""Compute what a run has cost: the hours of its ranks and GPUs, in all sessions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

_GROUPS = {
    "complete": "complete",
    **dict.fromkeys(("pruned", "paused", "promoted"), "stopped early"),
    **dict.fromkeys(("failed", "interrupted"), "failed or lost"),
}
CONFIRMATIONS = "confirmations"


@dataclass(frozen=True)
class Cost:
    """Hours in evaluations by their outcome.

    The hours of a killed evaluation are not known, except those before the checkpoint from which
    its retry has resumed.
    """

    rank_hours: Mapping[str, float]
    gpu_hours: Mapping[str, float]
    """Empty without GPUs."""


def compute_cost(
    evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation] = ()
) -> Cost:
    """Return the cost of the evaluations of a run, without imported ones."""
    ranks = defaultdict[str, float](float)
    gpus = defaultdict[str, float](float)
    for study, group in ((evaluations, ""), (confirmations, CONFIRMATIONS)):
        seconds: dict[int | None, float] = {e.trial: e.seconds for e in study}
        for evaluation in study:
            outcome = group or _GROUPS.get(evaluation.state, "")
            if not outcome or evaluation.imported_from:
                continue
            hours = _compute_own_seconds(evaluation, seconds) / 3600
            ranks[outcome] += hours * evaluation.ranks
            gpus[outcome] += hours * evaluation.gpu_count
    return Cost(_drop_zeros(ranks), _drop_zeros(gpus))


def _compute_own_seconds(evaluation: Evaluation, seconds: Mapping[int | None, float]) -> float:
    """Return the seconds of a trial that no earlier trial of its individual has recorded.

    `seconds` has those of all trials, by number; NaN if they are not known.
    """
    if math.isnan(evaluation.seconds):
        return 0.0
    before = seconds.get(evaluation.retry_of, math.nan)
    recorded = 0.0 if math.isnan(before) else evaluation.seconds_before
    return max(0.0, evaluation.seconds - recorded)


def _drop_zeros(hours: Mapping[str, float]) -> dict[str, float]:
    return {outcome: value for outcome, value in hours.items() if value > 0}
