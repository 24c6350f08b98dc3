"""Test `hpo watch` of a running run, on a screen and in a pipe."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from tests.support.launch import PROGRAM, SEARCHES, Mpi, wait_for_job
from tests.support.limits import scale
from tests.support.run_output import parse_lines
from tests.support.watching import (
    make_environment,
    make_light_command,
    run_in_terminal,
)


def wait_for_content(path: Path, writer: subprocess.Popen[str]) -> None:
    """Wait until a process has written to a file."""
    end = time.monotonic() + scale(60)
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < end
        assert writer.poll() is None, writer.communicate()
        time.sleep(0.05)


def test_watch_real_run_on_screen_and_in_pipe(mpi: Mpi, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [
        PROGRAM,
        SEARCHES / "gated.py",
        "--run-dir",
        run_dir,
        "--evaluations",
        30,
        "--confirm-seeds",
        1,
        "--top-n",
        2,
    ]
    gate, output = tmp_path / "gate", tmp_path / "listing.txt"
    settings = ["--ranks-per-worker", 1, "--set", f"gate={gate}"]
    job = mpi.start(2, *arguments, *settings, cwd=tmp_path)
    wait_for_content(run_dir / "run.json", job)
    with output.open("w") as file:
        listing = subprocess.Popen(
            make_light_command("watch", run_dir),
            env=make_environment(),
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    wait_for_content(output, listing)
    with run_in_terminal("watch", run_dir) as screen:
        screen.wait_for("a minute")
        screen.wait_for("best loss over time")
        gate.touch()
        screen.press(b"q")
        assert screen.wait_for_end() == 0
        title, *found = screen.left_behind.splitlines()
        assert re.search(
            r" [1-9]\d?/30 evaluations, [\d.]+ a minute, about .* left, then --confirm-seeds", title
        )
        best = re.compile(r"best \d\S*  trial \d+, found 0:\d\d ago on island [01] by worker [01]")
        assert any(map(best.match, (re.sub(r"\x1b\[[\d;]*m", "", line) for line in found)))
    assert job.poll() is None
    wait_for_job(job)
    assert job.returncode == 0
    listed = wait_for_job(listing)
    assert (listed.returncode, listed.stderr) == (0, "")
    printed = output.read_text()
    ended = parse_lines(printed)
    search = [line for line in ended if line["budget"] == "30"]
    assert [int(line["done"]) for line in search] == list(range(31 - len(search), 31))
    assert len(search) > 5
    assert [line["done"] for line in ended if line["budget"] == "2"] == ["1", "2"]
    assert printed.index("30/30") < printed.rindex("finished")
    assert "confirmed: trial" in printed
