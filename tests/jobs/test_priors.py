"""Test runs and checks that begin with priors."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.launch import HPO, PROGRAM, Hpo, Mpi
from tests.support.run_output import load_trials

FILE = """
import math
from hpo import Float, Int, SearchSpace

space = SearchSpace(
    lr=Float(1e-5, 1e-1, log=True, prior=1e-4), width=Int(8, 512, prior={prior}), depth=Int(1, 20)
)
space.require(lambda p: p["width"] * p["depth"] <= {limit}, "width * depth must be at most {limit}")

def objective(params, worker):
    width = abs(params["width"] - 64) / 500
    yield abs(math.log10(params["lr"]) + 4) + width + params["depth"] / 100
"""


def test_run_begins_with_priors_and_shows_agreement(mpi: Mpi, hpo: Hpo, tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(FILE.format(prior=500, limit=5000))
    arguments = [PROGRAM, "search.py", "--run-dir", "run", "--ranks-per-worker", 1]
    first = mpi.run(2, *arguments, "--evaluations", 40, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert trials[0].params.items() >= {"lr": 1e-4, "width": 500}.items()
    assert trials[0].params["depth"] <= 10, "The constraint must hold."
    assert trials[0].user_attrs["propagator"] == "priors"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    shown = re.search(
        r"\n +lr +0\.0001 +medium +(-?\d\.\d+) +(\w+).*\n +width +500 +medium", first.stdout
    )
    assert shown
    assert (
        f"{summary['priors'][0]['correlation']:.2f}",
        summary["priors"][0]["verdict"],
    ) == shown.groups()
    assert [each["name"] for each in summary["priors"]] == ["lr", "width"]
    assert re.search(
        r"<td>width</td><td>500</td><td>medium</td>", (tmp_path / "run" / "report.html").read_text()
    )

    again = mpi.run(2, *arguments, "--evaluations", 44, "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    (tmp_path / "search.py").write_text(FILE.format(prior=70, limit=5000))
    given = ["--enqueue", '[{"lr": 0.01, "width": 9, "depth": 3}]']
    changed = mpi.run(2, *arguments, *given, "--evaluations", 48, "--resume", cwd=tmp_path)
    assert (changed.returncode, changed.stderr) == (0, "")
    origins = [trial.user_attrs["propagator"] for trial in load_trials(tmp_path / "run")]
    assert origins[44:46] == ["--enqueue", "priors"], "The enqueued individuals come first."
    assert origins.count("priors") == 2, "A changed prior is evaluated, and an old one only once."
    alone = [*arguments[:2], *given, "--evaluations", 1, "--run-dir", "alone"]
    assert mpi.run(2, *alone, cwd=tmp_path).returncode == 0
    (only,) = load_trials(tmp_path / "alone")
    assert only.params["width"] == 9, "The budget has no place for the priors."
    status, printed, _ = hpo("top", tmp_path / "run")
    assert (status, re.search(r"\n +width +70 +medium ", printed) is not None) == (0, True)


def test_check_trains_the_individual_of_the_priors(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(FILE.format(prior=500, limit=1000))
    job = mpi.run(1, *HPO, "check", "search.py", cwd=tmp_path)
    assert job.stdout.startswith("search.py: lr=0.0001  width=500  depth="), job.stderr
    (tmp_path / "search.py").write_text(FILE.format(prior=500, limit=300))
    refused = mpi.run(
        2, PROGRAM, "search.py", "--run-dir", "run", "--ranks-per-worker", 1, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert re.fullmatch(
        r"error: search\.py: the priors: width \* depth must be at most 300, got .*\n",
        refused.stderr,
    )
    assert not (tmp_path / "run").exists()
