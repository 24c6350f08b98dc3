"""Test runs with several objectives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpo.errors import UsageError
from hpo.store.pareto_front import MAX_FRONT_WEIGHTS
from hpo.store.record import Record
from hpo.store.weights import make_weights_path, read_weights
from hpo.trainer.search_file import load_search_file
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials, remove_loading_lines
from tests.support.runs import start_session

TRADING = SEARCHES / "trading.py"


# Whole runs


def test_run_with_objectives_is_resumed_and_keeps_its_front(mpi: Mpi, tmp_path: Path) -> None:
    command = [PROGRAM, TRADING, "--run-dir", "run", "--top-n", 2]
    first = mpi.run(4, *command, "--evaluations", 10, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    job = mpi.run(
        2,
        *command,
        "--evaluations",
        24,
        "--resume",
        "--confirm-seeds",
        1,
        "--pruner",
        "asha",
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (0, "")
    assert (
        job.stdout.count("10 evaluations of earlier sessions did not record width, speed at rungs")
        == 1
    )
    assert "resumed after 10 evaluations" in job.stdout
    trials = load_trials(tmp_path / "run")
    assert len(trials) == 24
    ended = [trial for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")]
    for trial in ended:
        best = min(trial.intermediate_values, key=lambda epoch: trial.intermediate_values[epoch])
        width = trial.params["width"]
        assert trial.values == [trial.intermediate_values[best], width, 10.0 * best / width], (
            "The values must belong to the best loss."
        )
        at_rungs = {"1": [trial.intermediate_values[1], width, 10.0 / width], "3": trial.values}
        rungs = [rung for rung in at_rungs if int(rung) <= len(trial.intermediate_values)]
        assert trial.user_attrs.get("at_rungs", {}) == (
            {r: at_rungs[r] for r in rungs} if trial.number >= 10 else {}
        )
    assert {len(trial.intermediate_values) for trial in ended} == {1, 3}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    study = Record(tmp_path / "run" / "study.log", "run").study
    expected = {trial.number for trial in study.best_trials}
    assert {entry["trial"] for entry in summary["front"]} <= expected
    assert (summary["objectives"], summary["maximized"]) == (["loss", "width", "speed"], ["speed"])
    assert summary["best"] == summary["front"][0] == summary["top"][0]
    kept = {int(path.stem) for path in (tmp_path / "run" / "front").iterdir()}
    assert kept <= {entry["trial"] for entry in summary["front"]}
    assert len(kept) >= min(MAX_FRONT_WEIGHTS, len(summary["front"])) - 2, (
        "Weights may have been dropped when the front was full."
    )
    weights = read_weights(make_weights_path(tmp_path / "run" / "front", max(kept)))
    assert weights is not None
    assert weights.state["width"].item() == weights.params["width"]
    confirming = load_trials(tmp_path / "run", "run-confirm")
    assert {trial.user_attrs["confirms"] for trial in confirming} == {
        entry["trial"] for entry in summary["top"]
    }
    assert all(len(trial.values) == 3 for trial in confirming)


def test_evaluation_without_reported_objective_fails(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text('[{"width": 2}, {"width": 3}]')
    options = [
        "--run-dir",
        "run",
        "--evaluations",
        2,
        "--set",
        "lacks=width,speed",
        "--enqueue",
        "given.json",
    ]
    job = mpi.run(2, PROGRAM, TRADING, *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (3, "")
    reasons = [
        f"{lacks!r} must be a finite number, since it is an objective, but the first rank "
        f"reported {there!r}. Report it with each loss, as in yield loss, {{{lacks!r}: ...}}"
        for lacks, there in (("width", "speed"), ("speed", "width"))
    ]
    assert [trial.user_attrs["failure"] for trial in load_trials(tmp_path / "run")] == reasons
    assert all(reason[:60] in job.stdout for reason in reasons)


def test_run_with_objective_mistakes_is_refused_first(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(TRADING, tmp_path / "mine.py")
    start_session(tmp_path / "run", tmp_path / "mine.py")
    text = TRADING.read_text()
    (tmp_path / "mine.py").write_text(
        text.replace('("loss", "width", maximize("speed"))', '("loss", "width")')
    )
    job = mpi.run(2, PROGRAM, "mine.py", "--run-dir", "run", "--resume", cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert "they were loss, width, speed (maximised), and are loss, width in mine.py" in job.stderr
    assert len(job.stderr.splitlines()) == 1
    with pytest.raises(
        UsageError,
        match="--propagators must be among ga, tpe, random for several objectives, got pso",
    ):
        start_session(tmp_path / "new", TRADING, propagators=("pso",))
    with pytest.raises(UsageError, match="--pbt must be used with the loss as the only objective"):
        start_session(tmp_path / "new", TRADING, pbt=True)
    assert not (tmp_path / "new").exists()


MAXIMIZING = """
from hpo import Float, SearchSpace, maximize

space = SearchSpace(x=Float(0.0, 1.0))
objectives = (maximize("accuracy"),)


def objective(params, worker):
    for epoch in range(3):
        yield 1 - (params["x"] - 0.3) ** 2 - 0.1 * abs(epoch - 1), {"epoch": epoch}
"""


def test_first_objective_can_be_a_score_that_is_maximised(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "maximizing.py").write_text(MAXIMIZING)
    options = ["--ranks-per-worker", 2, "--evaluations", 6, "--run-dir", "run"]
    job = mpi.run(2, PROGRAM, "maximizing.py", *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    for trial in load_trials(tmp_path / "run"):
        accuracy = 1 - (trial.params["x"] - 0.3) ** 2
        assert trial.values == [pytest.approx(-accuracy)]
        assert trial.user_attrs["metrics"] == {"accuracy": pytest.approx(accuracy), "epoch": 1}


def test_first_objective_of_a_script_must_be_the_loss(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    file = tmp_path / "search.py"
    file.write_text(
        "from hpo import Float, Script, SearchSpace, maximize\n"
        f"objective = Script({str(tmp_path / 'train.py')!r})\n"
        "space = SearchSpace(x=Float(0, 1))\nobjectives = [maximize('accuracy')]\n"
    )
    with pytest.raises(UsageError, match="the first objective of a Script must be 'loss'"):
        load_search_file(file)
