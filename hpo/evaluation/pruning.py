"""Optuna's pruners by the names that they have on the command line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, PercentilePruner, SuccessiveHalvingPruner

from hpo.errors import UsageError


def make_pruner(name: str) -> BasePruner | None:
    """Return the pruner of this name; None for the name "none". Raises UsageError where no pruner has the name."""
    if percentile := re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", name):
        if 0 < float(percentile[1]) < 100:
            return PercentilePruner(float(percentile[1]))
    elif name in ("none", "median", "asha", "hyperband"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            kinds: dict[str, Callable[[], BasePruner]] = {
                "median": MedianPruner,
                "asha": SuccessiveHalvingPruner,
                "hyperband": HyperbandPruner,
            }
            return kinds[name]() if name in kinds else None
    raise UsageError(
        f"--pruner must be none, median, percentile:P with P between 0 and 100, asha or hyperband, not {name!r}"
    )
