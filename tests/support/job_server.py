"""Run commands on the ranks of MPI jobs that stay up, since a start takes long.

A job server is one MPI job: mpirun starts its ranks, which then run one command after the other,
each as the program of a rank would. A command that ends its job also ends the server.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.support.limits import scale
from tests.support.template_server import PROGRAMS, ROOT, start_template_server

_SECONDS_TO_START = 60.0
_SECONDS_TO_END = 20.0
_MAX_COMMANDS = 50  # Each command makes communicators, of which MPI has a limited number.


@cache
def get_environment() -> dict[str, str]:
    """Return the variables of this process at the first call, before a test has changed them."""
    return dict(os.environ)


class OutputFile:
    """A file in memory, to which processes append their output."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("hpo-test")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        """Return all output."""
        return Path(self.path).read_text(errors="replace")

    def close(self) -> None:
        """Free the memory."""
        os.close(self._descriptor)


class JobServer:
    """An MPI job that runs one command after the other.

    Args:
        mpirun: Command line of mpirun.
        python: Path of the Python of the ranks.
        ranks: Number of ranks.
    """

    def __init__(self, mpirun: Sequence[str], python: str, ranks: int) -> None:
        templates = start_template_server().name
        self._output, self._errors = OutputFile(), OutputFile()
        self._count = 0
        self._connections: list[socket.socket] = []
        name = f"hpo-test-{uuid.uuid4().hex}"
        command = [
            *mpirun,
            "-n",
            str(ranks),
            python,
            str(PROGRAMS / "serve_jobs.py"),
            name,
            templates,
        ]
        with (
            socket.socket(socket.AF_UNIX) as listener,
            Path(self._output.path).open("a") as out,
            Path(self._errors.path).open("a") as err,
        ):
            listener.bind(f"\0{name}")
            listener.listen(ranks)
            listener.settimeout(1.0)
            self._mpirun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**get_environment(), "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
            while len(self._connections) < ranks:
                self._connections.append(self._accept_rank(listener))

    def _accept_rank(self, listener: socket.socket) -> socket.socket:
        end = time.monotonic() + scale(_SECONDS_TO_START)
        while self._mpirun.poll() is None and time.monotonic() < end:
            with suppress(TimeoutError):
                return listener.accept()[0]
        self.kill()
        raise RuntimeError(f"the job server has not started: {self._errors.read()}")

    @property
    def is_usable(self) -> bool:
        """Whether this server can run another command."""
        return self._mpirun.poll() is None and self._count < _MAX_COMMANDS

    def run(
        self, arguments: Sequence[str], folder: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` on all ranks, with the variables of this process.

        Raises:
            TimeoutError: The command has not ended after `seconds`. The server is killed.
        """
        self._count += 1
        try:
            return self._run(arguments, folder, seconds)
        except BaseException:
            self.kill()  # A later command must not get the answers to this one.
            raise

    def _run(
        self, arguments: Sequence[str], folder: Path, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        out, err = OutputFile(), OutputFile()
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        request = {"arguments": arguments, "folder": str(folder), "variables": variables}
        request |= {"out": out.path, "err": err.path}
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(f"{json.dumps(request)}\n".encode())
        statuses = self._read_statuses(time.monotonic() + seconds)
        texts = [out.read(), err.read()]
        out.close()
        err.close()
        if statuses is None:
            raise TimeoutError(
                "\n".join([f"still running after {seconds:.0f} s: {arguments}", *texts])
            )
        if len(statuses) == len(self._connections):
            return subprocess.CompletedProcess(arguments, max(statuses), *texts)
        status = self._mpirun.wait(scale(30))
        return subprocess.CompletedProcess(
            arguments, status, texts[0] + self._output.read(), texts[1] + self._errors.read()
        )

    def _read_statuses(self, end: float) -> list[int] | None:
        """Return the exit statuses of the ranks, without those that ended with the job.

        None after the time limit.
        """
        waiting = list(self._connections)
        answers = ""
        while waiting:
            ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            for connection in ready:
                waiting.remove(connection)
                with suppress(OSError):
                    answers += connection.recv(100).decode()
        return [int(status) for status in answers.split()]

    def close(self) -> None:
        """End the server, or kill it if a rank does not end."""
        for connection in self._connections:
            connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(_SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        """Kill the server."""
        for connection in self._connections:
            connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._mpirun.pid, signal.SIGKILL)
        self._mpirun.wait()


@cache
def _get_servers() -> dict[tuple[str, ...], JobServer]:
    """Return the servers of this test process by their command and number of ranks.

    They end with it.
    """
    servers: dict[tuple[str, ...], JobServer] = {}

    def close_servers() -> None:
        for server in servers.values():
            server.close()

    atexit.register(close_servers)
    return servers


def run_in_job_server(
    mpirun: Sequence[str],
    python: str,
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    seconds: float,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on a number of ranks in a job server, which starts if necessary.

    See `JobServer.run`.
    """
    servers, key = _get_servers(), (*mpirun, python, str(ranks))
    if key in servers and not servers[key].is_usable:
        servers.pop(key).close()
    if key not in servers:
        servers[key] = JobServer(mpirun, python, ranks)
    return servers[key].run(arguments, folder, seconds)
