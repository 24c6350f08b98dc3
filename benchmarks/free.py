"""A search with an objective that takes no time, to measure the time that everything else takes."""

from __future__ import annotations

import math
from typing import Any

from hpo import Categorical, Float, Int, SearchSpace
from hpo.trainer.worker import Worker

space = SearchSpace(
    layers=Int(1, 20),
    lr=Float(1e-5, 1.0, log=True),
    gamma=Float(0.0, 1.0),
    activation=Categorical("relu", "tanh", "elu"),
)


def objective(params: dict[str, Any], worker: Worker) -> float:
    """Compute a loss without training."""
    assert worker.size
    wrong = params["activation"] != "elu"
    return float(
        (params["layers"] - 8) ** 2 / 100
        + math.log10(params["lr"] / 0.01) ** 2
        + params["gamma"]
        + wrong
    )
