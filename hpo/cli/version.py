"""What `hpo --version` prints."""

from __future__ import annotations

import platform

from hpo.versions import read_versions


def print_versions() -> None:
    """Print the version of this package, and those of what it depends on."""
    for name, version in read_versions().items():
        print(f"{name} {version}")
    print(f"MPI: {_find_mpi()}")
    print(platform.platform())


def _find_mpi() -> str:
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # a process that joins a job would have to leave it, too
        from mpi4py import MPI

        return " ".join(MPI.Get_library_version().splitlines()[0].split())
    except (ImportError, RuntimeError) as error:  # no library is found
        return f"not found ({str(error).splitlines()[0]})"
