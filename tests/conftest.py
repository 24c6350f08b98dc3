"""The environment of all tests, and real MPI jobs: each has a time limit, and a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# What programs need to be found and to speak; whatever else this shell has (SLURM's job, an MPI's options, proxies,
# colours, accounts, Python's and torch's switches) is another's, and would reach the jobs of the tests.
_KEPT = {"PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE"}
_KEPT |= {"PYTHONUTF8", "PYTHONCOERCECLOCALE", "PYTHONIOENCODING"}
_KEPT_KINDS = ("LC_", "PYTEST_")

ROOT = Path(__file__).resolve().parents[1]
SEARCHES = ROOT / "tests" / "searches"
PROGRAMS = ROOT / "tests" / "programs"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason=f"no {FASHION_MNIST}: apt install dataset-fashion-mnist"
)


def changed_program(folder: Path, code: str) -> Path:
    """Write run_islands.py with code that runs before it does, such as what breaks a part of it."""
    program = folder / "changed.py"
    program.write_text((ROOT / "run_islands.py").read_text().replace("if __name__", f"{code}\n\nif __name__"))
    return program


@dataclass(frozen=True)
class Mpi:
    """An MPI's mpirun, the Python that uses it, and what mpirun needs to start 8 ranks as root on two cores."""

    mpirun: str = "mpirun"
    python: str = sys.executable
    flags: tuple[str, ...] = ()

    def start(
        self, ranks: int, *arguments: object, cwd: Path, stdout: int = subprocess.PIPE, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a Python program on some ranks."""
        command = [self.mpirun, *self.flags, "-n", str(ranks), self.python, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, ranks: int, *arguments: object, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Run a Python program on some ranks to its end; kill it and fail where it takes too long."""
        return finish(self.start(ranks, *arguments, cwd=cwd), timeout)


def finish(process: subprocess.Popen[str], timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Wait for a job; kill it and fail where it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s: {process.args!r}\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _open_mpi() -> Mpi:
    """Open MPI in an environment of its own beside the one that runs the tests, as `make open-mpi` makes it."""
    folder = Path(sys.prefix + "-open-mpi", "bin")
    if not (folder / "mpirun").exists():
        pytest.skip(f"no Open MPI in {folder}: make open-mpi")
    return Mpi(str(folder / "mpirun"), str(folder / "python"), ("--allow-run-as-root", "--oversubscribe"))


def pytest_configure() -> None:
    """Let tests have the same environment everywhere, before one of them imports MPI, which would join another job.

    GPUs are hidden: what the tests compare was computed on CPUs.
    """
    for name in list(os.environ):
        if name not in _KEPT and not name.startswith(_KEPT_KINDS):
            del os.environ[name]
    os.environ.update(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Return tests a home without anybody's accounts and settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def available_mpis() -> list[Mpi]:
    """Return the MPIs that are installed here."""
    there = Path(sys.prefix + "-open-mpi", "bin", "mpirun").exists()
    return [Mpi(), *([_open_mpi()] if there else [])]


@pytest.fixture
def mpi() -> Mpi:
    return Mpi()


@pytest.fixture(params=["mpirun", "open-mpi"])
def each_mpi(request: pytest.FixtureRequest) -> Mpi:
    return Mpi() if request.param == "mpirun" else _open_mpi()
