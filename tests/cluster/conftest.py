"""Provide a simulated cluster to tests, and skip them with a reason if it cannot be."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.simulation import SlurmCluster, find_missing_requirement
from tests.support.launch import SEARCHES

SEARCH_FILE = SEARCHES / "clustered.py"


def make_cluster() -> SlurmCluster:
    """Return a cluster whose shared directory has the search space file `my_search.py`."""
    simulated = SlurmCluster()
    shutil.copy(SEARCH_FILE, simulated.folder / "my_search.py")
    return simulated


@pytest.fixture(scope="session")
def missing_requirement() -> str:
    """Why the cluster cannot be simulated here; an empty text if it can."""
    return find_missing_requirement()


@pytest.fixture
def cluster(missing_requirement: str) -> Iterator[SlurmCluster]:
    """Yield a cluster.

    The directory that its nodes share has the search space file `my_search.py`.
    """
    if missing_requirement:
        pytest.skip(missing_requirement)
    with make_cluster() as simulated:
        yield simulated
