"""Evaluations without a record, for what only reads them."""

from __future__ import annotations

import math
from typing import Any

from hpo.store.evaluations import Evaluation


def make_evaluation(trial: int, state: str = "complete", **values: Any) -> Evaluation:
    """Return an evaluation by a worker that took 10 s, the trial's number of seconds after the epoch."""
    loss = 1.0 if state in ("complete", "pruned") else math.inf
    ended = trial + 10.0 if state in ("complete", "pruned", "failed") else math.nan
    given: dict[str, Any] = {"loss": loss, "params": {"lr": 0.1}, "island": 0, "worker": 0, "generation": 0}
    return Evaluation(trial, state, **{**given, "started": float(trial), "ended": ended, **values})
