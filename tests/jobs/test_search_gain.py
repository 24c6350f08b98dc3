"""Test searches that end when little is expected."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpo.results.reader import RunReader
from hpo.views.live.run_header import format_header
from hpo.views.live.run_status import compute_run_status
from hpo.views.next_gain_text import format_next_gain
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials

SMOOTH = SEARCHES / "smooth.py"


def test_run_ends_when_little_is_expected_and_can_be_continued(mpi: Mpi, tmp_path: Path) -> None:
    # The share of a gain near a loss of 0 remains large.
    (tmp_path / "shifted.py").write_text(SMOOTH.read_text().replace("sum(", "1 + sum("))
    arguments = [PROGRAM, "shifted.py", "--run-dir", "run", "--ranks-per-worker", 1, "--evaluations", 200]
    job = mpi.run(2, *arguments, "--stop-gain", "5%", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "\nStopped: the expected gain is less than --stop-gain 5%. To resume: the same command" in job.stdout
    assert "and a lower --stop-gain, or --stop-gain off\n" in job.stdout
    ended = [trial for trial in load_trials(tmp_path / "run") if trial.state.name == "COMPLETE"]
    assert 20 <= len(ended) < 190
    expected = json.loads((tmp_path / "run" / "summary.json").read_text())["next"]
    assert expected["evaluations"] == 20
    assert 0 <= expected["gain"] < 0.05
    shown = format_next_gain(expected).partition(", in ")[0]
    assert f"\n{shown}" in job.stdout
    snapshot = RunReader(tmp_path / "run").make_follower().take_snapshot()
    header = [line.plain for line in format_header(compute_run_status(snapshot), Path("run"))]
    assert any(line.startswith(shown) for line in header), header
    assert shown in (tmp_path / "run" / "report.html").read_text()

    again = mpi.run(2, *arguments, "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert "the expected gain is less than --stop-gain 5%" in again.stdout
    assert len([trial for trial in load_trials(tmp_path / "run") if trial.state.name == "COMPLETE"]) == len(ended)
    limit = ["--evaluations", len(ended) + 10]
    more = mpi.run(2, *arguments[:-2], *limit, "--resume", "--stop-gain", "off", cwd=tmp_path)
    assert (more.returncode, more.stderr) == (0, "")
    assert "--stop-gain was 5% before, and is off now" in more.stdout
    assert len([trial for trial in load_trials(tmp_path / "run") if trial.state.name == "COMPLETE"]) == len(ended) + 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stop-gain", "130%"), r"--stop-gain must be more than 0% and less than 100%, got 130%"),
        (("--stop-gain", "0"), r"--stop-gain must be more than 0% and less than 100%, got 0%"),
        (("--stop-gain", "few"), r".*'--stop-gain': must be a percentage, such as 1%, or off, got 'few'.*"),
        (("--stop-gain", "nan"), r"--stop-gain must be more than 0% and less than 100%, got nan%"),
    ],
)
def test_wrong_gain_is_refused(mpi: Mpi, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    job = mpi.run(1, PROGRAM, SMOOTH, *options, cwd=tmp_path)
    assert job.returncode == 2
    assert re.fullmatch(f"error: {message}\n", job.stderr)
    assert not list(tmp_path.iterdir())


def test_gain_needs_one_objective_without_parents(mpi: Mpi, tmp_path: Path) -> None:
    several = mpi.run(1, PROGRAM, SEARCHES / "trading.py", "--stop-gain", "1%", cwd=tmp_path)
    assert (several.returncode, several.stderr.count("--stop-gain needs a search with one objective")) == (2, 1)
    parents = mpi.run(1, PROGRAM, SEARCHES / "heirs.py", "--pbt", "--stop-gain", "1%", cwd=tmp_path)
    assert (parents.returncode, parents.stderr.count("--pbt and --stop-gain 1% exclude each other")) == (2, 1)
