"""Test the job servers, in which other tests run their jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_server import run_in_job_server

pytestmark = pytest.mark.mpi


def run_code(code: str, folder: Path, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python code on the two ranks of a job server."""
    return run_in_job_server(("mpirun",), sys.executable, 2, ["-c", code, *arguments], folder, seconds)


def test_command_has_its_own_folder_variables_output_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import os, sys; print(os.getcwd(), os.environ.get('SET'), sys.argv[1:]); print('no', file=sys.stderr); exit(5)"
    )
    monkeypatch.setenv("SET", "1")
    first = run_code(code, tmp_path, "a", "b")
    assert (first.returncode, first.stderr) == (5, "no\nno\n")
    assert first.stdout == 2 * f"{tmp_path} 1 ['a', 'b']\n"
    monkeypatch.delenv("SET")
    second = run_code(code, Path("/"))
    assert second.stdout == 2 * "/ None []\n"


def test_commands_share_processes_until_one_ends_its_job(tmp_path: Path) -> None:
    process = "import os; print(os.getpid())"
    first, second = (set(run_code(process, tmp_path).stdout.split()) for _ in range(2))
    assert first == second
    assert len(first) == 2
    crash = "import os, signal, sys; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    ended = run_code(crash, tmp_path)
    assert ended.returncode != 0
    assert "here" in ended.stdout
    third = set(run_code(process, tmp_path).stdout.split())
    assert len(third) == 2
    assert not third & first


def test_command_that_hangs_is_killed_after_its_time_limit(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    with pytest.raises(TimeoutError, match="still running after 2 s") as error:
        run_code(code, tmp_path, seconds=2)
    processes = [line for line in str(error.value).splitlines() if line.isdecimal()]
    assert len(processes) == 2
    for process in processes:
        while Path("/proc", process).exists():
            os.sched_yield()
    assert run_code("print('next')", tmp_path).stdout == "next\nnext\n"
