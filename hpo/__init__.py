"""Evolutionary hyperparameter search with multi-rank workers."""

from typing import TYPE_CHECKING

from hpo.inside import report
from hpo.objectives import maximize
from hpo.parameters import Categorical, Float, Int, Ordinal
from hpo.script import Script
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.prediction import Prediction, TextSample
    from hpo.trainer.worker import Worker

    trial: int | None
    folder: Path | None

__all__ = [
    "Categorical",
    "Float",
    "Int",
    "Ordinal",
    "Prediction",
    "Script",
    "SearchSpace",
    "TextSample",
    "Worker",
    "folder",
    "maximize",
    "report",
    "trial",
]


def __getattr__(name: str) -> object:
    """Return what depends on the process, and import on first use what needs torch or numpy: ranks need neither."""
    if name == "Worker":
        from hpo.trainer.worker import Worker

        return Worker
    if name in ("Prediction", "TextSample"):
        from hpo import prediction

        return getattr(prediction, name)
    if name in ("trial", "folder"):
        from hpo import inside

        return inside.find_trial() if name == "trial" else inside.find_folder()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
