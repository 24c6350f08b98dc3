"""Experiment trackers that a run is shown to: they follow its record, each from a process of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress

from hpo.errors import UsageError

TRACKERS = ("tensorboard", "mlflow", "wandb")  # the packages that are imported, and the extras that bring them


def check_trackers(names: Sequence[str]) -> None:
    """Raise a UsageError unless there are such trackers, and their packages are installed; none is imported."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--tracker: there is no tracker {name!r}; there are {', '.join(TRACKERS)}")
        if not _is_installed(name):
            raise UsageError(f"--tracker {name}: it is not installed here: pip install 'hpo-islands[{name}]'")


def _is_installed(package: str) -> bool:
    with suppress(ImportError):
        found = importlib.util.find_spec(package)
        return found is not None and found.origin is not None  # a folder of that name has none
    return False
