"""Whether what a search needs is installed. Commands that read runs need neither MPI, Propulate nor torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from hpo.errors import UsageError

_NEEDED = ("mpi4py", "propulate", "torch")
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
PROPULATE = "propulate>=1.2.2,<1.3"  # as in pyproject.toml


def check_packages(program: str) -> None:
    """Raise a UsageError that says how to install what a search needs, if it is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if not missing:
        return
    commands = ["pip install 'hpo-islands[search]'"] if missing != ["propulate"] else []
    if "propulate" in missing and sys.version_info >= (3, 13):
        # GPy, which Propulate's metadata asks for, has no wheels for Python 3.13 (GPy 1.13.2), and is not used here.
        commands.append(f"pip install --no-deps '{PROPULATE}'")
    commands = commands or [f"pip install '{PROPULATE}'"]
    raise UsageError(f"{program} needs {', '.join(missing)}, not installed here: {' && '.join(commands)}")


def import_mpi() -> None:
    """Import mpi4py's MPI, which begins MPI; raise a UsageError that says what would help if no library is found."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI ({str(error).splitlines()[0]}): load the MPI module of the cluster, or "
            "pip install 'hpo-islands[mpich]'"
        ) from error


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a launcher says that this rank is the first one, or does not say anything."""
    return next((environment[name] for name in _RANKS if name in environment), "0") == "0"
