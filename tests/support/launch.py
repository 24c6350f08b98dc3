"""Launch MPI jobs with a time limit, and run the command lines of this program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_server import run_in_job_server
from tests.support.limits import scale
from tests.support.template_server import PROGRAMS as PROGRAMS
from tests.support.template_server import ROOT as ROOT
from tests.support.template_server import start_template_server

PROGRAM = ROOT / "run_islands.py"
SEARCHES = ROOT / "tests" / "searches"
SCRIPTS = ROOT / "tests" / "scripts"
HPO = ("-c", "from hpo.cli import main; main()")  # arguments of Python
SEARCH = [*HPO, "search"]
LR = ["--space", "lr=Float(1e-3, 1e-1, log=True)"]  # options of a search over scripts
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")

Hpo = Callable[..., tuple[int, str, str]]  # returns the status, standard output and standard error
ALONE = ("--islands", 1, "--ranks-per-worker", 1)  # Each rank is a worker.

needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.is_dir(), reason=f"no {FASHION_MNIST}: apt install dataset-fashion-mnist"
)


def write_changed_program(folder: Path, code: str) -> Path:
    """Write a copy of run_islands.py that first runs `code`."""
    program = folder / "changed.py"
    program.write_text(
        (ROOT / "run_islands.py").read_text().replace("if __name__", f"{code}\n\nif __name__")
    )
    return program


def run_torchrun(folder: Path, *command: object, params: dict[str, Any]) -> str:
    """Run a script with torchrun on two ranks, and return what it prints on stdout."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    options = [part for name, value in params.items() for part in (f"--{name}", str(value))]
    job = subprocess.run(
        [*torchrun, PROGRAMS / "leaving.py", *map(str, command), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=scale(100),
        check=False,
    )
    assert job.returncode == 0, job.stderr
    return job.stdout


@dataclass(frozen=True)
class Mpi:
    """An installed MPI.

    Attributes:
        mpirun: Its mpirun.
        python: The Python with its mpi4py.
        flags: Options that mpirun needs, for example to start many ranks as root.
        forks_templates: Whether jobs of hpo have their templates forked by the template server of
            the tests, which saves the import of torch. Otherwise they start them, as for users.
    """

    mpirun: str = "mpirun"
    python: str = sys.executable
    flags: tuple[str, ...] = ()
    forks_templates: bool = True

    def make_command(self, ranks: int, *arguments: object) -> list[str]:
        """Return a command line that runs `python ARGUMENTS` on a number of ranks."""
        is_forking = self.forks_templates and _is_hpo(arguments)
        forking = (PROGRAMS / "run_forking.py", start_template_server().name) if is_forking else ()
        return [
            self.mpirun,
            *self.flags,
            "-n",
            str(ranks),
            self.python,
            *map(str, (*forking, *arguments)),
        ]

    def start(
        self,
        ranks: int,
        *arguments: object,
        cwd: Path,
        stdout: int = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start a Python program on a number of ranks, and return the process of mpirun."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.Popen(
            self.make_command(ranks, *arguments),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, ranks: int, *arguments: object, cwd: Path, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program on ranks to its end: hpo in a job server, others by `launch`.

        Variables that a process reads when it starts, such as PYTHONWARNINGS, do not reach a job
        server. Use `launch` for tests of them, and `forks_templates=False` if they are for
        trainers.

        If it takes longer than `timeout` seconds on a usual machine, kill it and fail the test.
        """
        if not (self.forks_templates and _is_hpo(arguments)):
            return self.launch(ranks, *arguments, cwd=cwd, timeout=timeout)
        command = list(map(str, arguments))
        return run_in_job_server(
            (self.mpirun, *self.flags), self.python, ranks, command, cwd, scale(timeout)
        )

    def launch(
        self, ranks: int, *arguments: object, cwd: Path, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program on a number of ranks to its end, in an MPI job of its own.

        If it takes longer than `timeout` seconds, kill it and fail the test.
        """
        return wait_for_job(self.start(ranks, *arguments, cwd=cwd), timeout)


def _is_hpo(arguments: Sequence[object]) -> bool:
    """Return whether a command line of Python runs hpo."""
    return str(arguments[0]) == str(PROGRAM) or arguments[:2] == HPO


def wait_for_job(
    process: subprocess.Popen[str], timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a job.

    If it takes longer than `timeout` seconds, kill it and fail the test.
    """
    try:
        out, err = process.communicate(timeout=scale(timeout))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s: {process.args!r}\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def find_open_mpi() -> Mpi:
    """Return the Open MPI that `make open-mpi` installs in its own environment.

    Skip the test if it is missing.
    """
    folder = Path(sys.prefix + "-open-mpi", "bin")
    if not (folder / "mpirun").exists():
        pytest.skip(f"no Open MPI in {folder}: make open-mpi")
    return Mpi(
        str(folder / "mpirun"), str(folder / "python"), ("--allow-run-as-root", "--oversubscribe")
    )


def list_available_mpis() -> list[Mpi]:
    """Return the MPIs that are installed here."""
    is_installed = Path(sys.prefix + "-open-mpi", "bin", "mpirun").exists()
    return [Mpi(), *([find_open_mpi()] if is_installed else [])]


def make_hpo_command(*arguments: object) -> list[str]:
    """Return a command line that runs hpo, even if the package is not installed."""
    return [sys.executable, *HPO, *map(str, arguments)]


def run_hpo(
    *arguments: object, cwd: Path = ROOT, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run hpo to its end in its own process, with the text `typed` as its standard input."""
    return subprocess.run(
        make_hpo_command(*arguments),
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=scale(60),
    )


def call_hpo(*arguments: object) -> int:
    """Run hpo in this process, and return its exit status."""
    from hpo.cli.command_line import call_app, run_command
    from hpo.cli.commands import app

    return run_command(lambda: int(call_app(app, "hpo", list(map(str, arguments))) or 0), "hpo")
