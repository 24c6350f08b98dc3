"""Test runs in which the system clock is set: no duration is shown or written as negative."""

from __future__ import annotations

import json
import math
from pathlib import Path

import optuna
import pytest

from hpo.results.reader import RunReader
from hpo.results.summary import compute_busy_fraction, make_summary_content
from hpo.text_format import format_duration
from hpo.trackers.tracker import collect_results, find_timestamp
from hpo.views.evaluation_details import EvaluationLookup, format_evaluation, make_json_content
from hpo.views.export import make_evaluation_table
from hpo.views.live.table_rows import make_columns
from hpo.views.page.html_report import render_report
from hpo.views.progress import ProgressLines
from hpo.views.summary_tables import print_tables, print_times
from hpo.views.times import WorkingTime
from tests.support.runs import START_SECONDS, add_evaluation, make_run, start_session

BACK = -7184.1  # duration of an evaluation in seconds, after the clock was set back


def test_negative_duration_is_shown_as_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_evaluation(make_run(tmp_path / "run"), seconds=BACK)
    run = RunReader(tmp_path / "run")
    (evaluation,) = run.read_evaluations()
    assert math.isnan(evaluation.seconds)
    assert "  best        ?  layers=1" in ProgressLines([], 1).format_line(evaluation)
    print_tables(summary := run.make_summary(1), Path("run"))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:4:2]] == [
        "seconds",
        "?",
    ]
    assert (
        json.loads(json.dumps(make_summary_content(summary), allow_nan=False))["best"]["seconds"]
        is None
    )
    details = EvaluationLookup.read(run).collect_details(evaluation)
    assert make_json_content(details)["seconds"] is None
    (ended,) = [
        line
        for line in format_evaluation(details, Path("run"), "", START_SECONDS)
        if line.startswith("ended")
    ]
    assert ended.endswith(", after an unknown time")
    table = make_evaluation_table(run)
    assert table.rows[0][list(table.column_types).index("seconds")] is None
    cells = {
        column.heading: column.format_value(evaluation)
        for column in make_columns([evaluation], run.manifest.objectives, START_SECONDS)
    }
    assert (cells["trial"], cells["loss"], cells["seconds"]) == ("0", "0.5", "")
    page = render_report(run, 1, START_SECONDS)
    assert "it took an unknown time" in page
    assert "after the first evaluation began" not in page
    assert (collect_results(evaluation), find_timestamp(evaluation)) == (
        {"lowest_loss": 0.5},
        START_SECONDS,
    )


def test_working_time_skips_negative_durations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_run(tmp_path / "run")
    for began, seconds in ((0.0, 10.0), (100.0, BACK), (105.0, 5.0)):
        add_evaluation(record, began=START_SECONDS + began, seconds=seconds)
    evaluations = RunReader(tmp_path / "run").read_evaluations()
    time = WorkingTime(evaluations, None)
    assert time.total == 15
    assert [time.compute_seconds(evaluation.ended) for evaluation in evaluations] == [10, 0, 15]
    assert compute_busy_fraction(evaluations[1:2], 1, since=0.0) is None
    print_times(wall_seconds=BACK, worker_busy_fraction=0.5)
    print_times(wall_seconds=90.0, worker_busy_fraction=0.5)
    assert (
        capsys.readouterr().out
        == "workers busy 50.0% of the time from the first evaluation to the last\n"
        "1 min 30 s; workers busy 50.0% of the time from the first evaluation to the last\n"
    )
    assert [format_duration(seconds) for seconds in (BACK, math.nan, 0.0)] == [
        "an unknown time",
        "an unknown time",
        "0.0 s",
    ]


@pytest.mark.slow
def test_warm_start_drops_negative_duration(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/mine.db"
    study = optuna.create_study(study_name="mine", storage=url)
    study.enqueue_trial({"depth": 2, "act": "relu", "flag": True, "lr": 0.5})
    trial = study.ask(
        {
            "depth": optuna.distributions.IntDistribution(1, 9),
            "act": optuna.distributions.CategoricalDistribution(["relu", "tanh"]),
            "flag": optuna.distributions.CategoricalDistribution([True, False]),
            "lr": optuna.distributions.FloatDistribution(0, 1),
        }
    )
    study.tell(trial, 0.5)
    (ended,) = study.trials
    assert ended.datetime_start is not None
    ended.datetime_complete = ended.datetime_start.replace(year=2001)
    before = optuna.create_study(study_name="before", storage=f"sqlite:///{tmp_path}/before.db")
    before.add_trial(ended)
    record = start_session(
        tmp_path / "run", warm_start=f"sqlite:///{tmp_path}/before.db"
    ).open_record()
    (imported,) = record.read_evaluations()
    assert imported.loss == 0.5
    assert math.isnan(imported.seconds)
    assert "seconds" not in record.study.trials[0].user_attrs
