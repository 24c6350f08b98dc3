"""What is shared on a host, as far as it needs no MPI; the rest is in test_mpi.py."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hpo.ranks import sharing


def test_files_of_processes_that_were_killed_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    host = socket.gethostname()
    others = {f"hpo-{host}-{os.getpid()}-abc", f"hpo-elsewhere-{dead.pid}-abc", f"hpo-{host}-notes", "data"}
    for name in {*others, f"hpo-{host}-{dead.pid}-abc"}:
        (tmp_path / name).touch()
    path, *_ = sharing._write(np.zeros(3))
    assert {file.name for file in tmp_path.iterdir()} == {*others, Path(path).name}
    assert Path(path).name.startswith(f"hpo-{host}-{os.getpid()}-")
