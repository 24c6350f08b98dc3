"""Summarize what further evaluations of a run are expected to gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpo.store.evaluations import Evaluation
from hpo.store.manifest import Manifest
from hpo.store.search_gain import estimate_next_gain


def summarize_next_gain(evaluations: Sequence[Evaluation], run: Manifest) -> dict[str, Any] | None:
    """Return what the next tenth of the budget is expected to gain, and how long it takes.

    Returns:
        The number of `evaluations`, their `gain` as a share of the lowest loss (None if that is 0), and their time in
        `seconds`, if all workers evaluate. None for several objectives, and if there are too few evaluations.
    """
    expected = None if run.objectives.is_multi_objective else estimate_next_gain(evaluations, run.budget)
    if expected is None:
        return None
    seconds = expected.seconds / run.layout.workers
    return {
        "evaluations": expected.evaluations,
        "gain": expected.gain if math.isfinite(expected.gain) else None,
        "seconds": round(seconds, 3) if math.isfinite(seconds) else None,
    }
