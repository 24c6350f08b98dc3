"""What came out of a run: counts, the best individuals, and how busy the workers were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hpo.record import Evaluation, rank


def summarize(
    evaluations: Sequence[Evaluation],
    budget: int,
    top_n: int,
    wall_seconds: float = 0.0,
    workers: int = 0,
    since: float = 0.0,
) -> dict[str, Any]:
    """Give the content of summary.json.

    `since`, in seconds since the epoch, and `workers` say which evaluations the busy fraction is about: those that this
    session of the run has started.
    """
    best = rank(evaluations, 1)
    islands = sorted({evaluation.island for evaluation in evaluations if evaluation.finished})
    return {
        "evaluations": counts(evaluations, budget),
        "best": _entry(best[0]) if best else None,
        "top": [_entry(evaluation) for evaluation in rank(evaluations, top_n)],
        "islands": [
            {"island": island, "top": [_entry(e) for e in rank([e for e in evaluations if e.island == island], top_n)]}
            for island in islands
        ],
        "wall_seconds": round(wall_seconds, 3),
        "worker_busy_fraction": round(busy_fraction(evaluations, workers, since), 4),
    }


def counts(evaluations: Sequence[Evaluation], budget: int) -> dict[str, int]:
    """Count evaluations by state; what was interrupted is repeated and not counted."""
    states = Counter(evaluation.state for evaluation in evaluations)
    return {**{state: states[state] for state in ("complete", "pruned", "failed", "running")}, "budget": budget}


def busy_fraction(evaluations: Sequence[Evaluation], workers: int, since: float) -> float:
    """Give the share of the workers' time, from the first evaluation's start to the last one's end, in evaluations."""
    ours = [evaluation for evaluation in evaluations if evaluation.finished and evaluation.started >= since]
    if not ours or not workers:
        return 0.0
    span = max(evaluation.ended for evaluation in ours) - min(evaluation.started for evaluation in ours)
    return min(1.0, sum(evaluation.seconds for evaluation in ours) / (workers * span)) if span > 0 else 1.0


def _entry(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "trial": evaluation.trial,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "island": evaluation.island,
        "worker": evaluation.worker,
        "generation": evaluation.generation,
        "seconds": evaluation.seconds,
        "metrics": evaluation.metrics,
    }
