"""Print the versions of all software that matters for a bug report (`hpo --version`)."""

from __future__ import annotations

import platform

from hpo.versions import read_versions


def print_versions() -> None:
    """Print the versions of this package, of its dependencies, of MPI and of the platform."""
    for name, version in read_versions().items():
        print(f"{name} {version}")
    print(f"MPI: {_find_mpi()}")
    print(platform.platform())


def _find_mpi() -> str:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # Otherwise, the import starts MPI, which would have to be finalized.
        from hpo.ranks.communicator import describe_mpi

        return describe_mpi()
    except (ImportError, RuntimeError) as error:  # The MPI library is missing.
        return f"not found ({str(error).splitlines()[0]})"
