"""Whether what a search needs is installed. Commands that read runs need neither MPI, Propulate nor torch."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from hpo.errors import UsageError

_REQUIRED_PACKAGES = ("mpi4py", "propulate", "torch")
PROPULATE_REQUIREMENT = "propulate>=1.2.2,<1.3"  # as in pyproject.toml


def check_packages(program: str) -> None:
    """Raise a UsageError with the command that installs what a search needs, if it is missing."""
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if not missing:
        return
    commands = ["pip install 'hpo-islands[search]'"] if missing != ["propulate"] else []
    if "propulate" in missing and sys.version_info >= (3, 13):
        # GPy, which Propulate's metadata asks for, has no wheels for Python 3.13 (GPy 1.13.2), and is not used here.
        commands.append(f"pip install --no-deps '{PROPULATE_REQUIREMENT}'")
    commands = commands or [f"pip install '{PROPULATE_REQUIREMENT}'"]
    raise UsageError(f"{program} needs {', '.join(missing)}, not installed here: {' && '.join(commands)}")


def import_mpi() -> None:
    """Import mpi4py's MPI, which begins MPI. Raise a UsageError with a remedy if no library is found."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI ({str(error).splitlines()[0]}): load the MPI module of the cluster, or "
            "pip install 'hpo-islands[mpich]'"
        ) from error
