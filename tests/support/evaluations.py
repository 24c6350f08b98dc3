"""Evaluations without a study, for tests of functions that only read them."""

from __future__ import annotations

import math
from typing import Any

from hpo.store.evaluations import Evaluation


def make_evaluation(trial: int, state: str = "complete", **values: Any) -> Evaluation:
    """Return an evaluation that started `trial` seconds after the epoch, and took 10 s."""
    loss = 1.0 if state in ("complete", "pruned") else math.inf
    ended = trial + 10.0 if state in ("complete", "pruned", "failed") else math.nan
    given: dict[str, Any] = {
        "loss": loss,
        "params": {"lr": 0.1},
        "island": 0,
        "worker": 0,
        "generation": 0,
    }
    return Evaluation(trial, state, **{**given, "started": float(trial), "ended": ended, **values})
