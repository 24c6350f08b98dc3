"""Test the job servers, in which other tests run their jobs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_server import JobServer
from tests.support.limits import scale

pytestmark = pytest.mark.mpi


@pytest.fixture
def server() -> Iterator[JobServer]:
    server = JobServer(["mpirun"], sys.executable, 2)
    yield server
    server.close()


def run_code(
    server: JobServer, code: str, folder: Path, *arguments: str, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python code on the two ranks of a job server."""
    return server.run(["-c", code, *arguments], folder, scale(seconds))


def test_command_has_its_own_folder_variables_output_and_status(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys; print(os.getcwd(), os.environ.get('SET'), sys.argv[1:]); print('no', "
        "file=sys.stderr); exit(5)"
    )
    monkeypatch.setenv("SET", "1")
    first = run_code(server, code, tmp_path, "a", "b")
    assert (first.returncode, first.stderr) == (5, "no\nno\n")
    assert first.stdout == 2 * f"{tmp_path} 1 ['a', 'b']\n"
    monkeypatch.delenv("SET")
    second = run_code(server, code, Path("/"))
    assert second.stdout == 2 * "/ None []\n"


def test_commands_share_processes_until_one_ends_its_job(server: JobServer, tmp_path: Path) -> None:
    process = "import os; print(os.getpid())"
    first, second = (set(run_code(server, process, tmp_path).stdout.split()) for _ in range(2))
    assert first == second
    assert len(first) == 2
    crash = "import os, signal; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    ended = run_code(server, crash, tmp_path)
    assert ended.returncode != 0
    assert "here" in ended.stdout
    assert not server.is_usable


def test_command_that_hangs_is_killed_after_its_time_limit(
    server: JobServer, tmp_path: Path
) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    with pytest.raises(TimeoutError, match="still running after") as error:
        run_code(server, code, tmp_path, seconds=2)
    processes = [line for line in str(error.value).splitlines() if line.isdecimal()]
    assert len(processes) == 2
    assert not server.is_usable
    end = time.monotonic() + scale(10)
    while any(Path("/proc", process).exists() for process in processes):
        assert time.monotonic() < end
        time.sleep(0.05)
