"""Test that hyperparameters and metrics with equal or reserved names get distinct names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpo import Categorical, Float, SearchSpace
from hpo.results.display_names import name_metrics
from hpo.results.reader import RunReader
from hpo.trackers.tracker import collect_results, convert_params
from hpo.views.live.run_status import compute_run_status, format_header
from hpo.views.live.table_rows import make_columns
from hpo.views.page.html_report import render_report
from hpo.views.progress import ProgressLines
from hpo.views.result_text import describe_winner
from hpo.views.summary_tables import print_tables
from tests.support.runs import START_SECONDS, add_evaluation, make_run

SPACE = SearchSpace(lr=Float(0, 1), trial=Float(0, 1), search=Categorical("a"))
METRICS = {"loss": 9.0, "metric_loss": 8.0, "lr": 7.0, "accuracy": 6.0}
SHOWN = {"metric_metric_loss": "9", "metric_loss": "8", "metric_lr": "7", "accuracy": "6"}


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    record = make_run(tmp_path / "run", SPACE)
    add_evaluation(
        record, params={"lr": 0.25, "trial": 0.75, "search": "a"}, space=SPACE, metrics=METRICS
    )
    return RunReader(tmp_path / "run")


def test_lines_show_values_of_equal_names(run: RunReader) -> None:
    expected = {"lr": "0.25", "trial": "0.75", "search": "a", **SHOWN}
    (evaluation,) = run.read_evaluations()
    assert (
        dict(re.findall(r"(\w+)=(\S+)", ProgressLines([], 1).format_line(evaluation))) == expected
    )
    snapshot = run.take_snapshot()
    (named,) = [
        line.plain
        for line in format_header(compute_run_status(snapshot), Path("run"))
        if "=" in line.plain
    ]
    expected["param_trial"] = expected.pop("trial")
    assert dict(re.findall(r"(\w+)=(\S+)", named)) == expected
    headings = [
        column.heading
        for column in make_columns([evaluation], run.manifest.objectives, START_SECONDS)
    ]
    assert headings[:3] == ["trial", "state", "loss"]
    assert sorted(headings[3:10]) == sorted(expected)


def test_tables_have_column_for_each_name(
    run: RunReader, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables(run.make_summary(1), Path("run"))
    lines = capsys.readouterr().out.split("The best\n")[1].splitlines()
    row = dict(zip(lines[0].split(), lines[2].split()[1:], strict=True))
    own = {
        "loss": "0.5",
        "trial": "0",
        "island": "0",
        "worker": "0",
        "generation": "0",
        "seconds": "1.0",
    }
    assert row == {"lr": "0.25", "param_trial": "0.75", "search": "a", **SHOWN, **own}
    table = render_report(run, 1, START_SECONDS).split('<section id="top">')[1]
    head = re.findall(r"<th[^>]*>([^<]+)</th>", table.split("</thead>")[0])
    assert sorted(head) == sorted(["place", *row])


def test_winner_has_loss_despite_metric_named_loss(run: RunReader) -> None:
    winner = run.find_winner()
    assert winner
    message = describe_winner(run, winner)[0]
    assert message.startswith("trial 0: loss=0.5  ")
    assert dict(re.findall(r"(\w+)=(\S+)", message)) == {"loss": "0.5", **SHOWN}


@pytest.mark.parametrize("lacks_seed", [False, True])
def test_report_says_that_other_seeds_need_a_placeholder(tmp_path: Path, lacks_seed: bool) -> None:
    record = make_run(tmp_path / "run", lacks_seed=lacks_seed)
    for loss in (0.5, 0.25):
        add_evaluation(record, curve={1: loss})
    page = render_report(RunReader(tmp_path / "run"), 1, START_SECONDS)
    assert "<code>--confirm-seeds 3</code> trains the best again" in page
    assert ("the command needs a placeholder for the seed" in page) == lacks_seed


def test_tracker_values_have_distinct_names(run: RunReader) -> None:
    (evaluation,) = run.read_evaluations()
    own = {"lowest_loss": 0.5, "seconds": 1.0}
    assert collect_results(evaluation) == {
        "metric_metric_loss": 9,
        "metric_loss": 8,
        "lr": 7,
        "accuracy": 6,
        **own,
    }
    assert convert_params(evaluation, taken=("search",)) == {
        "lr": 0.25,
        "trial": 0.75,
        "param_search": "a",
    }


def test_name_metrics_does_not_depend_on_order() -> None:
    for names in (["loss", "metric_loss"], ["metric_loss", "loss"]):
        assert name_metrics(names, [], ["loss"]) == {
            "loss": "metric_metric_loss",
            "metric_loss": "metric_loss",
        }
