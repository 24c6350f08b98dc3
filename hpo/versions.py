"""The versions of Python and of the packages that a run depends on."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "hpo-islands",
    "propulate",
    "mpi4py",
    "torch",
    "torchvision",
    "optuna",
    "numpy",
    "scikit-learn",
)


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages by name. No package is imported."""
    versions = dict.fromkeys(_PACKAGES, "not installed")
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"python": platform.python_version(), **versions}
