"""The environment and the fixtures of all tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.job_server import get_environment
from tests.support.launch import PROGRAM, ROOT, Hpo, Mpi, call_hpo, find_open_mpi
from tests.support.limits import measure_slowness
from tests.support.template_server import get_template_environment

# The variables that tests keep: paths and languages. All others would reach the jobs of the tests,
# for example the variables of SLURM, MPI, Python and torch, proxies, colours and accounts.
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
    """Set the same environment variables on all machines, before a test imports MPI.

    With the variables of another job, MPI could join this job. GPUs are hidden, since the expected
    results of tests were computed on CPUs. Processes compute with one thread, also if they are a
    job's only rank: on busy cores, threads that wait for each other take many times as long.
    """
    gc.disable()
    for name in list(os.environ):
        if name not in _KEPT_VARIABLES and not name.startswith(_KEPT_PREFIXES):
            del os.environ[name]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.environ.update(threads, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    # Lightning imports matplotlib, which warns if it takes long to list the fonts of a new HOME.
    os.environ["MPLCONFIGDIR"] = str(Path(sys.prefix, "matplotlib"))
    get_environment()
    get_template_environment()
    # Examples have no time limit, since the machine may be busy. They are the same in each test
    # run.
    clockless = hypothesis.settings(
        deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.register_profile("random", clockless)
    hypothesis.settings.register_profile("same", clockless, derandomize=True)
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before -m selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker mpi to tests that use the fixture `mpi` or `each_mpi`.

    Other tests that launch jobs have the marker in their code.
    """
    for item in items:
        if {"mpi", "each_mpi"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("mpi")


def pytest_collection_finish() -> None:
    """Collect garbage from now on, without the tests and modules, which are never freed."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Measure the speed of the machine before the first test with the marker mpi or slow."""
    if item.get_closest_marker("mpi") or item.get_closest_marker("slow"):
        measure_slowness()


@pytest.fixture(autouse=True)
def unmarked_launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that launches a job but does not have the marker mpi.

    `make test-fast` skips tests with this marker.
    """
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
    """Set a home directory without the user's accounts and settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def hpo(capsys: pytest.CaptureFixture[str]) -> Hpo:
    """Return a function that runs hpo here, and returns its status, output and errors."""

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
