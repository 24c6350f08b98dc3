"""Send the evaluations of a run to experiment trackers, such as MLflow. Each tracker has its own process."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress

from hpo.errors import UsageError

TRACKERS = ("tensorboard", "mlflow", "wandb")  # names of their packages and of the extras that install them


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers are known and that their packages are installed, without importing the packages.

    Raises:
        UsageError: A name is unknown, or its package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--tracker must be one of {', '.join(TRACKERS)}, got {name!r}.")
        if not _is_installed(name):
            raise UsageError(f"--tracker {name}: the package is not installed. Run: pip install 'hpo-islands[{name}]'")


def _is_installed(package: str) -> bool:
    with suppress(ImportError):
        found = importlib.util.find_spec(package)
        return found is not None and found.origin is not None  # A folder with the name of the package has no origin.
    return False
