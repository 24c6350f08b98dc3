"""Evolutionary hyperparameter search with multi-rank workers."""

from typing import TYPE_CHECKING

from hpo.objectives import maximize
from hpo.parameters import Categorical, Float, Int, Ordinal
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.prediction import Prediction, TextSample
    from hpo.trainer.worker import Worker

__all__ = ["Categorical", "Float", "Int", "Ordinal", "Prediction", "SearchSpace", "TextSample", "Worker", "maximize"]


def __getattr__(name: str) -> object:
    """Import on first use what needs torch or numpy: the ranks of a search need neither."""
    if name == "Worker":
        from hpo.trainer.worker import Worker

        return Worker
    if name in ("Prediction", "TextSample"):
        from hpo import prediction

        return getattr(prediction, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
