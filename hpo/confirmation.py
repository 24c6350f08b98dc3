"""A winner one can trust: the best of a run trained again with other seeds, and whether they can be told apart.

The loss by which an individual was chosen flatters it: it is the lowest of many. What confirms it is recorded in a
study of its own beside the run's, and in no budget.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.trials import Evaluation

if TYPE_CHECKING:
    from hpo.record import Record
    from hpo.space import SearchSpace

_SIGNIFICANT = 0.05


def plan(record: Record, best: Sequence[Evaluation], space: SearchSpace, count: int, seed: int) -> int:
    """Let each of the best wait to be trained with `count` seeds, and give how many evaluations there are then.

    The seeds are drawn, so that they are none that a run was started with; they are the same for the same `seed`.
    """
    rng = random.Random(f"confirm/{seed}")
    seeds = [rng.getrandbits(31) for _ in range(count)]
    planned = {(evaluation.confirms, evaluation.seed) for evaluation in record.evaluations()}
    for evaluation in best:
        for other in seeds:
            if (evaluation.trial, other) not in planned:
                place = {"confirms": evaluation.trial, "seed": other, "propagator": "--confirm"}
                record.enqueue(evaluation.params, space.distributions(), **place)
    return sum(evaluation.state != "interrupted" for evaluation in record.evaluations())


def compare(confirmations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Rank confirmed individuals by the mean of their losses, those that have failed behind all others.

    Gives for each its trial, its losses, their mean and standard deviation (None where there are too few), how many
    have failed, and `p`: how likely losses that differ as much from the first one's are where the means are the same
    (Welch, The generalization of Student's problem, 1947). `told_apart` is whether that is under 5%.
    """
    losses: dict[int, list[float]] = {}
    failed: dict[int, int] = {}
    for evaluation in confirmations:
        if evaluation.confirms is not None and evaluation.finished:
            failed.setdefault(evaluation.confirms, 0)
            losses.setdefault(evaluation.confirms, [])
            if evaluation.state == "complete":
                losses[evaluation.confirms].append(evaluation.loss)
            else:
                failed[evaluation.confirms] += 1
    entries: list[dict[str, Any]] = [
        {
            "trial": trial,
            "losses": found,
            "mean": statistics.fmean(found) if found else None,
            "deviation": statistics.stdev(found) if len(found) > 1 else None,
            "failed": failed[trial],
        }
        for trial, found in losses.items()
    ]
    entries.sort(key=lambda entry: (entry["failed"], math.inf if entry["mean"] is None else entry["mean"]))
    for entry in entries:
        entry["p"] = _welch(entries[0]["losses"], entry["losses"]) if entry is not entries[0] else None
        entry["told_apart"] = entry["p"] is not None and entry["p"] < _SIGNIFICANT
    return entries


def _welch(first: Sequence[float], other: Sequence[float]) -> float | None:
    """Give the p-value of Welch's t-test; None where there are too few losses for one."""
    if min(len(first), len(other)) < 2:
        return None
    if statistics.pstdev(first) == statistics.pstdev(other) == 0:  # there is no test for these
        return 1.0 if first[0] == other[0] else 0.0
    from scipy.stats import ttest_ind  # takes 0.2 s

    return float(ttest_ind(first, other, equal_var=False).pvalue)
