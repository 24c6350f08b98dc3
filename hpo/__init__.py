"""Evolutionary hyperparameter search with multi-rank workers."""

from importlib import import_module
from typing import TYPE_CHECKING

from hpo.evaluation_api import offer_weights, report, save_checkpoint
from hpo.objectives import maximize
from hpo.script_objective import Script
from hpo.space import Categorical, Float, Int, Ordinal, SearchSpace

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from hpo.prediction import Prediction, TextSample
    from hpo.run.ask_tell import Search, Trial
    from hpo.trainer.worker import Worker
    from hpo.views.run import Run, load_run

    checkpoint: Any
    trial: int | None
    folder: Path | None

__all__ = [
    "Categorical",
    "Float",
    "Int",
    "Ordinal",
    "Prediction",
    "Run",
    "Script",
    "Search",
    "SearchSpace",
    "TextSample",
    "Trial",
    "Worker",
    "checkpoint",
    "folder",
    "load_run",
    "maximize",
    "offer_weights",
    "report",
    "save_checkpoint",
    "trial",
]

# Their imports take time.
_LAZY_MODULES = {
    "Prediction": "hpo.prediction",
    "Run": "hpo.views.run",
    "Search": "hpo.run.ask_tell",
    "TextSample": "hpo.prediction",
    "Trial": "hpo.run.ask_tell",
    "Worker": "hpo.trainer.worker",
    "load_run": "hpo.views.run",
}


def __getattr__(name: str) -> object:
    """Return an attribute of the module that is computed or imported only when it is used.

    `checkpoint`, `folder` and `trial` depend on the running evaluation. The modules of the others
    need torch, numpy or Optuna.
    """
    if name in _LAZY_MODULES:
        return getattr(import_module(_LAZY_MODULES[name]), name)
    if name in ("checkpoint", "folder", "trial"):
        from hpo import evaluation_api

        find = {
            "checkpoint": evaluation_api.load_checkpoint,
            "folder": evaluation_api.find_folder,
            "trial": evaluation_api.find_trial,
        }
        return find[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
