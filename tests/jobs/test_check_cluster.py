"""Test `hpo check-cluster` on one host. tests/cluster has several hosts."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.chaos import Victim, kill_at_end
from tests.support.launch import HPO, ROOT, Mpi

CHECK = [*HPO, "check-cluster"]
# Trainers seed numpy before an objective. With this sitecustomize, their measurements never begin.
HOLD_TRAINERS = """
import time
import numpy

numpy.random.seed = lambda seed: time.sleep(3600)
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_check_cluster_on_one_host_measures_workers(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(4, *CHECK, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("4 ranks, 2 workers of 2, 2 islands, 1 host\n")
    assert "; ranks started by mpirun\n" in job.stdout
    (group,) = re.findall(
        r"^ a worker on one host +2 +2 +gloo +\S+ +(\S+) +(\S+)$", job.stdout, re.MULTILINE
    )
    assert all(float(number) > 0 for number in group)
    assert "\nok     The trainers of all workers have started and communicated\n" in job.stdout
    assert "clock" not in job.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.mpi
@pytest.mark.slow
def test_stopped_check_cluster_leaves_nothing(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(HOLD_TRAINERS)
    paths = {"PYTHONPATH": f"{tmp_path / 'python'}:{ROOT}"}
    # The launcher must not interrupt the template of a user's job.
    mpi = replace(mpi, forks_templates=False)
    with kill_at_end(Victim(mpi, 4, [*CHECK], tmp_path, tmp_path / "log", paths)) as victim:
        assert victim.wait_for("1 host")
        # A measurement begins with a folder for each worker.
        while not list((tmp_path / "tmp").glob("hpo-check-*")):
            assert victim.job.poll() is None
            victim.sleep(0.02)
        victim.job.send_signal(signal.SIGINT)
        assert victim.wait(30) == (130, "")
    lines = [
        line
        for line in (tmp_path / "log").read_text().splitlines()
        if not line.startswith("[mpiexec@")
    ]
    assert lines == ["4 ranks, 2 workers of 2, 2 islands, 1 host", "Stopped: SIGINT"]
    assert not list((tmp_path / "tmp").glob("hpo*"))
    assert not list(tmp_path.glob(".hpo*"))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks-per-worker", 3], "4 ranks cannot be divided into workers of 3"),
        (["--run-dir", "file"], "--run-dir must be a directory, got file: "),
        (["--run-dir", "link"], "--run-dir must be a directory, got link: "),
        (["--run-dir", "/proc/run"], "--run-dir /proc/run: /proc cannot be used: "),
        (
            ["--collective-timeout", "0"],
            "--collective-timeout must be from 1 second to 365 days, got 0 s",
        ),
        (["space.py"], "Got unexpected extra argument"),
    ],
)
def test_check_cluster_with_wrong_option_fails(
    mpi: Mpi, tmp_path: Path, options: list[object], message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    job = mpi.run(4, *CHECK, *options, cwd=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    (line,) = job.stderr.splitlines()
    assert line.startswith(f"error: {message}")
