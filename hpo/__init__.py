"""Evolutionary hyperparameter search with multi-rank workers."""

from typing import TYPE_CHECKING

from hpo.objectives import maximize
from hpo.parameters import Categorical, Float, Int, Ordinal
from hpo.prediction import Prediction, TextSample
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

__all__ = ["Categorical", "Float", "Int", "Ordinal", "Prediction", "SearchSpace", "TextSample", "Worker", "maximize"]


def __getattr__(name: str) -> object:
    """Import `Worker` when it is asked for: it needs torch, which a search space alone does not."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpo.trainer.worker import Worker

    return Worker
