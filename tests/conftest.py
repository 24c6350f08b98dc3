"""The environment of all tests, and the MPIs that they run with."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.launch import PROGRAM, ROOT, Hpo, Mpi, call_hpo, find_open_mpi

# What programs need to be found and to speak; whatever else this shell has (SLURM's job, an MPI's options, proxies,
# colours, accounts, Python's and torch's switches) is another's, and would reach the jobs of the tests.
_KEPT_VARIABLES = {
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "TZ",
    "LANG",
    "LANGUAGE",
}
_KEPT_VARIABLES |= {"PYTHONUTF8", "PYTHONCOERCECLOCALE", "PYTHONIOENCODING"}
_KEPT_PREFIXES = ("LC_", "PYTEST_")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests have the same environment everywhere, before one of them imports MPI, which would join another job.

    GPUs are hidden: what the tests compare was computed on CPUs.
    """
    for name in list(os.environ):
        if name not in _KEPT_VARIABLES and not name.startswith(_KEPT_PREFIXES):
            del os.environ[name]
    os.environ.update(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    # There is no deadline, since the machine may be busy. A change is judged by the same examples each time.
    hypothesis.settings.register_profile("random", deadline=None)
    hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what launches jobs by the fixtures below; what does so without them has the marker where it is written."""
    for item in items:
        if {"mpi", "each_mpi"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("mpi")


@pytest.fixture(autouse=True)
def unmarked_launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that launches a job, by whatever means, and has no marker by which `make test-fast` leaves it."""
    if request.node.get_closest_marker("mpi"):
        return
    start = subprocess.Popen.__init__

    def start_no_job(process: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        words = args if isinstance(args, (list, tuple)) else str(args).split()
        if {Path(os.fsdecode(word)).name for word in words} & {"mpirun", PROGRAM.name}:
            pytest.fail(f"a test that launches a job needs the marker mpi: {args!r}")
        start(process, args, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start_no_job)


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Return tests a home without anybody's accounts and settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one core: two threads that wait for each other take twenty times as long on busy ones."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hpo(capsys: pytest.CaptureFixture[str]) -> Hpo:
    """Run the command in this process, and return its status and what it has printed on either stream."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = call_hpo(*arguments)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def mpi() -> Mpi:
    return Mpi()


@pytest.fixture(params=["mpirun", "open-mpi"])
def each_mpi(request: pytest.FixtureRequest) -> Mpi:
    return Mpi() if request.param == "mpirun" else find_open_mpi()
