"""Test runs with conditional parameters, and with constraints that no individual satisfies."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from tests.searches.conditional import space as CONDITIONAL
from tests.support.launch import PROGRAM, SEARCHES, Mpi, run_hpo
from tests.support.run_output import load_trials


def test_run_in_conditional_space_is_resumed_and_shown(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        PROGRAM,
        SEARCHES / "conditional.py",
        "--run-dir",
        "run",
        "--ranks-per-worker",
        1,
        "--seed",
        3,
    ]
    given: list[dict[str, Any]] = [
        {"momentum": 0.8, "layers": 3},
        {"batch_size": 64.0, "beta": 0.95},
        {"nesterov_from": 7},
    ]
    (tmp_path / "given.json").write_text(json.dumps(given))
    first = mpi.run(3, *arguments, "--evaluations", 25, "--enqueue", "given.json", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    again = mpi.run(2, *arguments, "--evaluations", 60, "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert len(trials) == 60
    for trial in trials:
        CONDITIONAL.check(trial.params)
        assert trial.distributions.keys() == trial.params.keys()
    for number, entry in enumerate(given):
        assert entry.items() <= trials[number].params.items()
    assert len({tuple(sorted(trial.params.items())) for trial in trials}) == 60
    lowest = min(trials, key=lambda trial: trial.value or 0)
    assert lowest.number > 25, "The search must improve on its first session."

    printed = run_hpo("best", tmp_path / "run")
    assert json.loads(printed.stdout) == lowest.params
    rows = list(
        csv.DictReader(run_hpo("export", tmp_path / "run", "--to", "csv").stdout.splitlines())
    )
    for row, trial in zip(rows, trials, strict=True):
        empty = {name for name in CONDITIONAL.parameters if row[f"param_{name}"] == ""}
        assert empty == CONDITIONAL.parameters.keys() - trial.params.keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "A line has a gap if a hyperparameter is inactive." in page
    assert all(f'<th scope="row">{name}</th>' in page for name in CONDITIONAL.parameters), (
        "importances"
    )

    text = (SEARCHES / "conditional.py").read_text()
    (tmp_path / "stricter.py").write_text(
        text + '\nspace.require(lambda p: p["optimizer"] == "sgd", "only sgd")\n'
    )
    stricter = [PROGRAM, "stricter.py", "--ranks-per-worker", 1, "--evaluations", 61]
    refused = mpi.run(2, *stricter, "--run-dir", "run", "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert re.search(
        r": only sgd, got .*; if this constraint is new, start another run with --warm-start run$",
        refused.stderr,
    )
    new = mpi.run(
        2, *stricter, "--run-dir", "new", "--evaluations", 2, "--warm-start", "run", cwd=tmp_path
    )
    assert (new.returncode, new.stderr) == (0, "")
    taken = [
        trial for trial in load_trials(tmp_path / "new") if "imported_from" in trial.user_attrs
    ]
    assert len(taken) == sum(trial.params["optimizer"] == "sgd" for trial in trials)


def test_run_with_unsatisfiable_constraint_is_refused_first(mpi: Mpi, tmp_path: Path) -> None:
    text = (SEARCHES / "conditional.py").read_text()
    (tmp_path / "nothing.py").write_text(
        text + '\nspace.require(lambda p: p["width"] < 16, "width is small")\n'
    )
    job = mpi.run(2, PROGRAM, "nothing.py", "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 2
    assert job.stderr.startswith(
        "error: the constraints of this space leave nothing: of 10000 individuals"
    )
    assert "'width is small' 0" in job.stderr
    assert not (tmp_path / "run").exists()
