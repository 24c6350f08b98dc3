"""Find and import the MPI library."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

NOT_FOUND = "not found"


def import_mpi() -> None:
    """Import MPI, and so start it, unless ``mpi4py.rc.initialize`` is False.

    Raise ImportError or RuntimeError if mpi4py or its MPI library is missing.
    """
    try:
        from mpi4py import MPI
    except RuntimeError:
        os.environ.setdefault("MPI4PY_LIBMPI", _find_library_of_mpich())
        from mpi4py import MPI  # noqa: F401


def find_mpi() -> str:
    """Return the name and version of the MPI library, without starting MPI."""
    try:
        import mpi4py

        # Otherwise, the import starts MPI, which would have to be finalized.
        mpi4py.rc.initialize = False
        import_mpi()
        from hpo.ranks.communicator import describe_mpi

        return describe_mpi()
    except (ImportError, RuntimeError) as error:  # The MPI library is missing.
        reason, *_ = str(error).split("\n")
        return f"{NOT_FOUND} ({reason})"


def _find_library_of_mpich() -> str:
    """Return the path of the library in the package mpich; "" if it is not installed.

    mpi4py looks for it in sys.prefix, but ``uv run --with`` installs it elsewhere.
    """
    with suppress(PackageNotFoundError):
        for file in files("mpich") or ():
            if file.name == "libmpi.so.12":
                return str(Path(str(file.locate())).resolve())
    return ""
