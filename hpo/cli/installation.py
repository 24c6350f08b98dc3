"""Check that the packages that a search needs are installed. Commands that only read runs do not need them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from hpo.errors import UsageError

_REQUIRED_PACKAGES = ("mpi4py", "propulate", "torch")
PROPULATE_REQUIREMENT = "propulate>=1.2.2,<1.3"  # as in pyproject.toml


def check_packages(program: str) -> None:
    """Raise a UsageError if a package that a search needs is missing. The message has the command to install it."""
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if not missing:
        return
    commands = ["pip install 'hpo-islands[search]'"] if missing != ["propulate"] else []
    if "propulate" in missing and sys.version_info >= (3, 13):
        # Propulate requires GPy, which has no wheels for Python 3.13 (GPy 1.13.2), and is not used here.
        commands.append(f"pip install --no-deps '{PROPULATE_REQUIREMENT}'")
    commands = commands or [f"pip install '{PROPULATE_REQUIREMENT}'"]
    raise UsageError(f"{program} needs {', '.join(missing)}, not installed here. Run: {' && '.join(commands)}")


def import_mpi() -> None:
    """Import and initialize MPI. Raise a UsageError if mpi4py finds no MPI library."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI ({str(error).splitlines()[0]}). Load the MPI module of the cluster, or run: "
            "pip install 'hpo-islands[mpich]'"
        ) from error
