"""Test runs that a notebook or a program reads by `hpo.load_run`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from optuna.trial import TrialState

import hpo
from hpo.objectives import Objectives
from hpo.results.reader import RunReader
from hpo.store.evaluations import rank_evaluations
from hpo.trainer.search_file import load_search_file
from hpo.views.export import make_evaluation_table
from tests.support.launch import call_hpo
from tests.support.runs import (
    QUICK,
    add_evaluation,
    add_search,
    claim_evaluation,
    complete_evaluations,
    make_run,
    make_run_of_everything,
    start_session,
)
from tests.support.writer_stubs import LeaderStub, make_writer

# The calls of a notebook, except `best_weights`.
_NOTEBOOK = """
import sys
import hpo

run = hpo.load_run(sys.argv[1])
print(run.best.trial, len(run.evaluations), len(run.curves), len(run.front), len(run.figures))
run.show(1)
run.compare(run)
run._repr_html_()
run.importances
print([name for name in ("torch", "mpi4py", "propulate") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_of_everything(tmp_path_factory.mktemp("everything"))


def test_tables_have_the_columns_and_types_of_an_export(everything: Path) -> None:
    found = hpo.load_run(everything).evaluations
    expected = make_evaluation_table(RunReader(everything))
    assert list(found.columns) == list(expected.column_types)
    assert len(found) == len(expected.rows)
    for name, column in zip(expected.column_types, zip(*expected.rows, strict=True), strict=True):
        missing = [value is None for value in column]
        assert list(found[name].isna()) == missing, name
        assert [value for value in found[name] if not _is_missing(value)] == [
            value for value in column if value is not None
        ], name
    types = found.dtypes.astype(str)
    assert set(types[["trial", "island", "confirms", "inherits"]]) == {"Int64"}
    assert set(types[["loss", "seconds", "metric_accuracy"]]) == {"float64"}
    assert types["started"].startswith("datetime64")


def _is_missing(value: Any) -> bool:
    return not isinstance(value, list) and bool(pd.isna(value))


def test_tables_without_pandas_are_lists_of_dicts(
    everything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hpo.load_run(everything)
    table, curves = run.evaluations, run.curves
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["trial"] for row in run.evaluations] == list(table.trial)
    assert run.curves == curves.to_dict("records")
    assert run.importances == []


def test_curves_have_a_row_per_loss(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    add_evaluation(record, curve={1: 3.0, 2: 1.0})
    add_evaluation(record, curve={1: 2.0})
    curves = hpo.load_run(tmp_path / "run").curves
    assert curves.to_numpy().tolist() == [[0, 1, 3.0], [0, 2, 1.0], [1, 1, 2.0]]


def test_running_run_is_read_anew_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    run = hpo.load_run("run")
    assert (run.best, run.front, len(run.evaluations), run.figures) == (None, [], 0, {})
    assert "no evaluation has succeeded" in run._repr_html_()
    monkeypatch.chdir("/")
    add_evaluation(record, curve={1: 0.5})
    add_evaluation(record, curve={1: 0.25})
    assert run.best is not None
    assert (run.best.trial, run.best.loss, len(run.evaluations)) == (1, 0.25, 2)
    assert "history" in run.figures


def test_confirmations_of_a_resume_change_the_best(tmp_path: Path) -> None:
    session, space = start_session(tmp_path / "run"), load_search_file(QUICK).space
    complete_evaluations(session.open_record(), 1, 2)
    run = hpo.load_run(tmp_path / "run")
    assert run.best is not None
    assert run.best.trial == 0
    session = start_session(tmp_path / "run", resume=True, confirm_seeds=1, top_n=2)
    session.create_confirmations(space)
    confirmations = session.open_confirmations()
    best = rank_evaluations(session.open_record().read_evaluations(), 2)
    total = session.confirmation_plan.enqueue_planned(confirmations, best, space)
    for loss in (9.0, 8.0):
        assignment = claim_evaluation(confirmations, None, {}, total)
        confirmations.complete(assignment, loss, 1.0, {})
    assert run.best.trial == 1
    assert "trial 1: loss=2" in run._repr_html_()


def test_figures_are_those_of_the_report(tmp_path: Path) -> None:
    add_search(make_run(tmp_path / "run"), 60)
    figures = hpo.load_run(tmp_path / "run").figures
    slices = {name for name in figures if name.startswith("slice ")}
    assert slices == {f"slice {name}" for name in ("layers", "activation", "lr", "gamma")}
    assert figures.keys() - slices == {
        *("best", "history", "parallel", "curves", "timeline", "immigrants")
    }
    history = json.loads(figures["history"].to_json())
    island = next(trace for trace in history["data"] if trace["name"] == "island 0")
    assert island["marker"]["color"] == "#1f6fb5", "the first colour of islands in page.css"
    assert history["layout"]["xaxis"]["title"]["text"] == "evaluations that have ended"
    for name, figure in figures.items():
        assert '"--' not in figure.to_json(), f"{name} has a colour that plotly does not know"


def test_figures_of_objectives_are_named_after_them(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", objectives=Objectives(("loss", "--size")))
    for loss, size in ((1.0, 2.0), (2.0, 1.0), (3.0, 3.0)):
        add_evaluation(record, curve={1: loss}, metrics={"--size": size})
    run = hpo.load_run(tmp_path / "run")
    assert [evaluation.trial for evaluation in run.front] == [0, 1]
    front = run.figures["front --size"]
    assert front.layout.yaxis.title.text == "--size"
    assert "best" not in run.figures


def test_importances_have_the_most_important_first(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    for trial in range(40):
        layers, lr = 1 + trial % 5, 10 ** -(trial % 4)
        params = {"layers": layers, "activation": "relu", "lr": lr, "gamma": 0.5 + trial / 80}
        add_evaluation(record, curve={1: float(layers)}, params=params)
    table = hpo.load_run(tmp_path / "run").importances
    assert list(table.columns) == ["name", "share", "low", "high"]
    assert table.name[0] == "layers"
    assert table.share[0] > 0.5
    assert sum(table.share) == pytest.approx(1)


def test_best_weights_load_into_a_model(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    leader = LeaderStub(make_writer(record, tmp_path / "run"), settings={"epochs": 4})
    model = torch.nn.Linear(2, 1)
    params = {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}
    leader.complete(leader.begin(params), 0.5, model.state_dict())
    run = hpo.load_run(tmp_path / "run")
    loaded = torch.nn.Linear(2, 1)
    loaded.load_state_dict(run.best_weights())
    assert torch.equal(loaded.weight, model.weight)
    add_evaluation(record, curve={1: 0.25})
    with pytest.raises(ValueError, match=r"no weights of trial 1.*offer_weights"):
        run.best_weights()


def test_text_is_that_of_the_commands(
    everything: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_900_000_000.0)
    other = everything.with_name("before")
    run = hpo.load_run(everything)
    reads: list[tuple[Callable[[], None], list[object]]] = [
        (lambda: run.show(7), ["show", everything, 7]),
        (lambda: run.show("confirm-0"), ["show", everything, "confirm-0"]),
        (run.show, ["show", everything]),
        (lambda: run.compare(hpo.load_run(other)), ["compare", everything, other]),
    ]
    for read, command in reads:
        read()
        printed = capsys.readouterr().out
        assert call_hpo(*command) == 0
        assert capsys.readouterr().out == printed


def test_overview_shows_answer_and_escapes_values(tmp_path: Path) -> None:
    space = hpo.SearchSpace(norm=hpo.Categorical("<b>", "none"))
    record = make_run(tmp_path / "run", space)
    for loss in (0.5, 0.25):
        params = {"norm": "<b>"}
        add_evaluation(record, curve={1: loss}, params=params, space=space, metrics={"<i>": loss})
    add_evaluation(record, TrialState.FAIL, curve={}, params={"norm": "none"}, space=space)
    page = hpo.load_run(tmp_path / "run")._repr_html_()
    assert "trial 1: loss=0.25  &lt;i&gt;=0.25" in page
    assert "2 complete, 1 failed, of 64" in page
    assert ">&lt;b&gt;</td>" in page
    assert "<b>" not in page
    assert "<i>" not in page


@pytest.mark.slow
def test_reading_needs_neither_torch_nor_mpi(everything: Path) -> None:
    output = subprocess.run(
        [sys.executable, "-c", _NOTEBOOK, str(everything)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert output[0].split()[:2] == ["0", "13"]
    assert output[-1] == "[]"


def test_directory_without_a_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run: there is no .*run\.json"):
        hpo.load_run(tmp_path)
