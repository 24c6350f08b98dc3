"""The versions of Python and of the packages that a run depends on."""

from __future__ import annotations

import platform
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
    return {
        "python": platform.python_version(),
        **{package: _read_version(package) for package in _PACKAGES},
    }


def _read_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
