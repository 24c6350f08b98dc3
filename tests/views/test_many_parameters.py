"""Test searches of 150 hyperparameters, in a terminal of 80 columns and in the report."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from optuna.trial import TrialState

from hpo import Categorical, Float, SearchSpace
from hpo.results.reader import RunReader
from hpo.views.evaluation_details import EvaluationLookup
from hpo.views.page.html_report import render_report
from hpo.views.summary_tables import format_failed, print_tables
from tests.support.runs import START_SECONDS, add_evaluation, make_run

SPACE = SearchSpace(**{f"parameter_{n}": Float(0.0, 1.0) for n in range(150)})
DIFFERENT = [f"parameter_{n}" for n in range(5, 150, 12)][:12]


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    """Return a run in which only twelve hyperparameters differ much between individuals."""
    record, rng = make_run(tmp_path / "run", SPACE), random.Random(0)
    for trial in range(24):
        params = {
            name: rng.random() if name in DIFFERENT else 0.5 + trial / 1e6
            for name in SPACE.describe()
        }
        state = TrialState.FAIL if trial == 23 else TrialState.COMPLETE
        add_evaluation(
            record,
            state,
            curve={1: 1 + trial},
            params=params,
            space=SPACE,
            metrics={"accuracy": 0.5},
            failure="no",
        )
    return RunReader(tmp_path / "run")


def test_tables_show_the_most_different_hyperparameters(
    run: RunReader, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables(run.make_summary(4), Path("runs/wide"))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    first, second = out.split("The best\n")[1:]
    rows = {line.split()[0]: line.split()[1:] for line in first.rstrip().splitlines()[2:]}
    evaluations = run.read_evaluations()
    assert [name for name in rows if name.startswith("parameter")] == DIFFERENT
    for name in DIFFERENT:
        values = [evaluation.params[name] for evaluation in evaluations[:3]]
        assert [float(text) for text in rows[name]] == pytest.approx(values, rel=1e-3)
    assert (rows["loss"], rows["trial"]) == (["1", "2", "3"], ["0", "1", "2"])
    assert second.splitlines()[0].split() == ["4"]
    assert "138 other hyperparameters: hpo show runs/wide 0\n" in second


def test_failure_table_refers_to_hpo_show(run: RunReader) -> None:
    table, more = format_failed(EvaluationLookup.read(run).list_failed(), 3, Path("runs/wide"))
    assert [line.split() for line in table.splitlines()[1:4:2]] == [
        ["trial", "island", "worker", "seconds", "epochs", "failure"],
        ["23", "0", "0", "1.0", "1", "no"],
    ]
    assert more.endswith(
        "hpo show runs/wide 23 shows everything about trial 23, including its 150 hyperparameters"
    )


def test_report_shows_the_important_hyperparameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, draws = make_run(tmp_path / "run", SPACE), random.Random(0)
    for _ in range(40):
        params = {name: draws.random() for name in SPACE.describe()} | {
            "parameter_7": 0.5 + draws.random() / 1e3
        }
        params["parameter_9"] = draws.random() / 100 if draws.random() < 0.9 else draws.random()
        add_evaluation(
            record,
            TrialState.COMPLETE,
            curve={1: 1 + params["parameter_9"]},
            params=params,
            space=SPACE,
        )
    run = RunReader(tmp_path / "run")
    page = render_report(run, 10, START_SECONDS)
    table = page.split('<section id="top">')[1].split("</section>")[0]
    names = re.findall(r'<th scope="col">(\w+)</th>', table)
    assert len(names) == 12
    assert "parameter_9" in names, "It is the only important one, and the best hardly differ in it."
    assert "parameter_7" not in names
    assert "Of 150 hyperparameters, 12 are shown: those with a clear importance below" in table
    print_tables(run.make_summary(3), Path("runs/wide"))
    assert "parameter_9 " in capsys.readouterr().out
    assert page.split("<h2>The answer")[1].split("</table>")[0].count("<tr>") == 150, (
        "The answer must have all hyperparameters."
    )


def test_report_with_never_active_parameter_is_complete(tmp_path: Path) -> None:
    space = SearchSpace(
        kind=Categorical("plain", "rare"),
        lr=Float(0.0, 1.0),
        beta=Float(0.0, 1.0, when={"kind": "rare"}),
    )
    record, draws = make_run(tmp_path / "run", space), random.Random(0)
    for _ in range(30):
        rate = draws.random()
        add_evaluation(
            record,
            TrialState.COMPLETE,
            curve={1: 1 + rate},
            params={"kind": "plain", "lr": rate},
            space=space,
        )
    page = render_report(RunReader(tmp_path / "run"), 3, START_SECONDS)
    assert '<th scope="row">beta</th>' in page, "its importance is unclear"
