"""Evolutionary hyperparameter search with multi-rank workers."""

from typing import TYPE_CHECKING

from hpo.evaluation_api import offer_weights, report, save_checkpoint
from hpo.objectives import maximize
from hpo.script_objective import Script
from hpo.space import Categorical, Float, Int, Ordinal, SearchSpace

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from hpo.prediction import Prediction, TextSample
    from hpo.trainer.worker import Worker

    checkpoint: Any
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
    "checkpoint",
    "folder",
    "maximize",
    "offer_weights",
    "report",
    "save_checkpoint",
    "trial",
]


def __getattr__(name: str) -> object:
    """Return an attribute of the module that is computed or imported only when it is used.

    `checkpoint`, `folder` and `trial` depend on the running evaluation. `Worker`, `Prediction` and
    `TextSample` need torch or numpy.
    """
    if name == "Worker":
        from hpo.trainer.worker import Worker

        return Worker
    if name in ("Prediction", "TextSample"):
        from hpo import prediction

        return getattr(prediction, name)
    if name in ("checkpoint", "folder", "trial"):
        from hpo import evaluation_api

        find = {
            "checkpoint": evaluation_api.load_checkpoint,
            "folder": evaluation_api.find_folder,
            "trial": evaluation_api.find_trial,
        }
        return find[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
