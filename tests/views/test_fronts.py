"""Test how the Pareto front is shown: tables, progress lines, live view, exports and the report."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import TrialState

from hpo.objectives import Objectives
from hpo.results.hypervolume import compute_shares_over_time, make_box
from hpo.results.reader import RunReader
from hpo.results.summary import Summary, find_front_additions
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import FrontArchive, compute_costs, find_front
from hpo.store.run_dir import RunDir
from hpo.store.weights import BestWeights, make_weights_path
from hpo.trainer.state_files import write_tensors
from hpo.views.export import find_writer, make_evaluation_table
from hpo.views.live.run_status import compute_run_status, format_header
from hpo.views.live.run_watch import RunListing
from hpo.views.live.table_rows import make_island_rows
from hpo.views.page.front_figures import draw_fronts, draw_hypervolume
from hpo.views.page.html_report import render_report
from hpo.views.progress import ProgressLines
from hpo.views.summary_tables import print_tables
from tests.support.advice import find_by_kind, make_result
from tests.support.evaluations import make_evaluation
from tests.support.launch import Hpo
from tests.support.run_output import RESULT_LINE
from tests.support.runs import START_SECONDS, add_evaluation, make_manifest, make_run

TWO_OBJECTIVES = Objectives(("loss", "parameters"))
THREE_OBJECTIVES = Objectives(("loss", "parameters", "speed"), ("speed",))
# Loss, parameters and speed of trials 0 to 4. The front of loss and parameters is 3, 0 and 4.
VALUES = [
    (0.5, 100.0, 7.0),
    (0.25, 300.0, 3.0),
    (0.6, 200.0, 9.0),
    (0.25, 200.0, 2.0),
    (1000.0, 50.0, 1.0),
]


def make_front_run(path: Path, objectives: Objectives = TWO_OBJECTIVES, **about: Any) -> RunReader:
    """Return a run with five complete evaluations, a pruned one and a failed one."""
    record = make_run(path, objectives=objectives, **about)
    for trial, (loss, parameters, speed) in enumerate(VALUES):
        metrics = {"accuracy": 1 - loss, "parameters": parameters, "speed": speed}
        bred = "ga" if trial else ""
        add_evaluation(
            record,
            curve={1: 2 * loss, 2: loss},
            began=START_SECONDS + trial,
            metrics=metrics,
            propagator=bred,
        )
    add_evaluation(
        record,
        TrialState.PRUNED,
        curve={1: 0.1},
        began=START_SECONDS + 5,
        metrics={"parameters": 1.0, "speed": 99.0},
    )
    add_evaluation(
        record, TrialState.FAIL, curve={}, began=START_SECONDS + 6, failure="ValueError: no"
    )
    return RunReader(path)


def make_tradeoffs(values: list[tuple[float, float]], **others: Any) -> list[Evaluation]:
    """Return an evaluation for each pair of loss and number of parameters."""
    return [
        make_evaluation(
            trial, loss=loss, other_values=(size,), metrics={"parameters": size}, **others
        )
        for trial, (loss, size) in enumerate(values)
    ]


def test_summary_has_the_front_and_its_hypervolume(tmp_path: Path) -> None:
    summary = make_front_run(tmp_path / "run").make_summary(2)
    assert [evaluation.trial for evaluation in summary.front] == [3, 0, 4]
    # A loss of 1000 has diverged. The other losses end at 0.5 and sizes at 200. The reference is a
    # tenth farther.
    dominated = (0.525 - 0.25) * (215 - 200) + (0.525 - 0.5) * (200 - 100)
    found = summary.hypervolume
    assert found is not None
    assert found.share == pytest.approx(dominated / (1.1 * 0.25 * 1.1 * 150))
    assert found.ideal == [0.25, 50.0]
    assert found.reference == pytest.approx([0.525, 215])
    bred = {entry.propagator: (entry.evaluations, entry.improved) for entry in summary.propagators}
    assert bred == {"": (1, 1), "ga": (6, 3)}, (
        "trial 2 is dominated when it ends, and pruned trials do not join"
    )


def test_views_with_one_objective_omit_the_front(tmp_path: Path, hpo: Hpo) -> None:
    run = make_front_run(tmp_path / "run", Objectives())
    summary = run.make_summary(2)
    assert (summary.front, summary.hypervolume) == ([], None)
    (entry,) = [entry for entry in summary.propagators if entry.propagator == "ga"]
    assert entry.improved == 1
    assert "front" not in make_evaluation_table(run).column_types
    assert "front" not in json.loads(hpo("show", tmp_path / "run", 0, "--json")[1])
    said = [hpo(command, run.run_dir.path)[1:] for command in ("top", "best", "show")]
    assert "front" not in str(said).lower()
    assert not re.search(
        "front",
        re.sub(r'id="plotly">[^<]*', "", render_report(run, 3, START_SECONDS)),
        re.IGNORECASE,
    )


def test_front_archive_equals_the_front_of_all() -> None:
    values = [(float(n * 7 % 11), float(n * n % 13)) for n in range(60)]
    evaluations = make_tradeoffs(values)
    archive = FrontArchive(TWO_OBJECTIVES, evaluations[:5])
    for count, new in enumerate(evaluations[5:], start=6):
        so_far = find_front(evaluations[:count], TWO_OBJECTIVES)
        assert archive.add(new) == (new in so_far)
        assert sorted(entry.trial for entry in archive.front) == sorted(
            entry.trial for entry in so_far
        )
        assert len(archive.costs) == len(archive.front)
    assert not archive.add(make_evaluation(99, "pruned", loss=-1.0, other_values=(-1.0,)))
    assert not archive.add(make_evaluation(99, loss=-1.0)), "its second value is unknown"


def test_front_with_ties_equals_the_front_of_optuna(tmp_path: Path) -> None:
    """The front has 12 trials, but only 4 different pairs of values."""
    record = make_run(tmp_path / "run", objectives=TWO_OBJECTIVES)
    for trial in range(15):
        loss, parameters = (trial % 4, 3 - trial % 4) if trial < 12 else (9, 9)
        add_evaluation(
            record,
            curve={1: float(loss)},
            began=START_SECONDS + trial,
            metrics={"parameters": float(parameters)},
        )
    run = RunReader(tmp_path / "run")
    undominated = {trial.number for trial in record.study.best_trials}
    table = make_evaluation_table(run)
    marked = {row[1] for row in table.rows if row[list(table.column_types).index("front")]}
    assert marked == undominated == set(range(12))
    assert {evaluation.trial for evaluation in run.find_front()} == undominated
    archive = FrontArchive(TWO_OBJECTIVES)
    assert [
        evaluation.trial for evaluation in run.read_evaluations() if archive.add(evaluation)
    ] == list(range(12))
    assert {evaluation.trial for evaluation in archive.front} == undominated
    hypervolume = run.make_summary(2).hypervolume
    without_ties = [run.read_evaluations()[trial] for trial in (0, 1, 2, 3, 12, 13, 14)]
    assert hypervolume is not None
    assert hypervolume.ideal == [0.0, 0.0]
    assert (
        len(compute_shares_over_time(run.read_evaluations(), TWO_OBJECTIVES))
        == len(compute_shares_over_time(without_ties, TWO_OBJECTIVES))
        == 4
    )


def test_front_weights_are_kept_for_the_first_of_ties(tmp_path: Path) -> None:
    kept = BestWeights(RunDir(tmp_path), TWO_OBJECTIVES)
    for trial in (1, 2, 0):
        kept.update(make_evaluation(trial, loss=0.5, other_values=(5.0,)))
    assert [bool(kept.list_wanted_files(trial)) for trial in range(3)] == [True, False, False]
    archive = FrontArchive(
        TWO_OBJECTIVES, [make_evaluation(trial, loss=0.5, other_values=(5.0,)) for trial in (3, 5)]
    )
    assert [archive.would_join(trial, (0.5, 5.0)) for trial in (2, 4, 6)] == [True, False, False]


def test_long_front_shows_ties_in_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = make_tradeoffs([(1.0 + n % 8, 100.0 - n % 8) for n in range(30)])
    run = make_manifest(
        budget=30, objectives={"names": list(TWO_OBJECTIVES.names), "maximized": []}
    )
    print_tables(Summary(evaluations, run, 3), Path("run"))
    text = capsys.readouterr().out.split("The Pareto front\n")[1]
    trials = re.findall(r"^ *\d+ +[\d.]+ +\d+ .*?(\d+ \+\d+) ", text, re.MULTILINE)
    assert trials == [*(f"{trial} +3" for trial in range(6)), "6 +2", "7 +2"]
    assert (
        "22 others of the front: hpo top run -n 30 shows all; "
        "+1 is another trial with the same values" in text
    )
    print_tables(Summary(evaluations, run, 30), Path("run"))
    text = capsys.readouterr().out.split("The Pareto front\n")[1]
    assert "+1" not in text
    assert len(re.findall(r"^ *\d+ +[\d.]+ +\d+ ", text, re.MULTILINE)) == 30


def test_front_additions_count_imported_evaluations_first() -> None:
    given = make_evaluation(
        0,
        loss=0.5,
        other_values=(10.0,),
        imported_from="trial 3 of other",
        started=500.0,
        ended=510.0,
    )
    worse, better = (
        make_evaluation(1, loss=0.6, other_values=(10.0,)),
        make_evaluation(2, loss=0.6, other_values=(9.0,)),
    )
    assert find_front_additions([given, worse, better], TWO_OBJECTIVES) == [better]


def test_front_table_replaces_the_table_of_all_islands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_front_run(tmp_path / "run", THREE_OBJECTIVES)
    print_tables(run.make_summary(2), Path("run"))
    text = capsys.readouterr().out
    assert "All islands" not in text
    head, _, *rows = text.split("The Pareto front\n")[1].splitlines()
    assert head.split()[:4] == ["loss", "parameters", "speed", "accuracy"]
    assert [row.split()[1:4] for row in rows[:5]] == [
        ["0.25", "300", "3"],
        ["0.25", "200", "2"],
        ["0.5", "100", "7"],
        ["0.6", "200", "9"],
        ["1000", "50", "1"],
    ]
    about = (
        "5 individuals: none of them is better than another in all of loss, parameters and speed"
    )
    assert " ".join(rows).split(about)[1].startswith(" (maximised).")
    assert (
        "of the box between loss 0.25, parameters 50, speed 9 "
        "and loss 0.635, parameters 325, speed 0.2." in " ".join(rows)
    )
    assert "joined the front" in text


def test_front_table_of_a_long_front_names_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluations = make_tradeoffs([(1.0 + n, 100.0 - n) for n in range(30)])
    for asked, shown in ((3, 20), (25, 25), (30, 30)):
        print_tables(
            Summary(
                evaluations,
                make_manifest(
                    budget=30, objectives={"names": list(TWO_OBJECTIVES.names), "maximized": []}
                ),
                asked,
            ),
            Path("my runs/x"),
        )
        text = capsys.readouterr().out.split("The Pareto front\n")[1]
        rows = re.findall(r"^ *(\d+) +([\d.]+) +(\d+) ", text, re.MULTILINE)
        losses = [float(loss) for _, loss, _ in rows]
        assert len(rows) == shown
        assert losses == sorted(losses)
        assert (losses[0], losses[-1]) == (1, 30), "the ends of the front must be shown"
        command = f"{30 - shown} others of the front: hpo top 'my runs/x' -n 30 shows all"
        assert (command in text) == (shown < 30)


def test_progress_lines_mark_additions_to_the_front() -> None:
    evaluations = make_tradeoffs([(0.5, 100), (0.25, 300), (0.6, 200), (0.2, 50)])
    lines = ProgressLines(evaluations[:1], 40, TWO_OBJECTIVES)
    printed = [lines.format_line(new) + "\n" for new in evaluations[1:]]
    assert [RESULT_LINE.fullmatch(line)["best"] for line in printed] == ["front", None, "front"]  # type: ignore[index]
    end = lines.heading.index("seconds") + len("seconds")
    assert all(line[:end].endswith(" 0.0") and line[end : end + 2] == "  " for line in printed)
    assert lines.best_text == "front of 1, lowest loss 0.2 (trial 3: lr=0.1), "
    confirming = make_evaluation(9, loss=0.0, other_values=(0.0,), confirms=3)
    assert "front" not in lines.format_line(confirming)
    assert lines.best_text.startswith("front of 1, lowest loss 0.2 ")


def test_best_by_prints_the_best_in_one_objective(tmp_path: Path, hpo: Hpo) -> None:
    path = make_front_run(tmp_path / "run", THREE_OBJECTIVES).run_dir.path
    status, out, said = hpo("best", path)
    assert (status, json.loads(out)["gamma"]) == (0, 0.9)
    assert said.splitlines() == [
        "trial 1: loss=0.25  parameters=300  speed=3  accuracy=0.75",
        "5 individuals are on the front: --by parameters or --by speed chooses another",
    ]
    for name, trial in (("loss", 1), ("parameters", 4), ("speed", 2)):
        assert hpo("best", path, "--by", name)[2].startswith(f"trial {trial}: "), name
    status, out, said = hpo("best", path, "--by", "parameter")
    assert (status, out) == (2, "")
    assert (
        "--by must be an objective of this run (loss, parameters, speed), got parameter. "
        "Did you mean parameters?" in said
    )
    only = make_front_run(tmp_path / "only", Objectives()).run_dir.path
    assert hpo("best", only, "--by", "loss")[2] == hpo("best", only)[2]
    assert (
        "--by must be loss, the only objective of this run, got parameters"
        in hpo("best", only, "--by", "parameters")[2]
    )


def test_best_by_names_the_weights_of_the_chosen_trial(tmp_path: Path, hpo: Hpo) -> None:
    run_dir = make_front_run(tmp_path / "run").run_dir
    run_dir.front_weights.mkdir()
    for path, trial in (
        (make_weights_path(run_dir.front_weights, 4), 4),
        (run_dir.best_weights, 1),
    ):
        write_tensors(
            path, {"w": torch.zeros(1)}, {"trial": str(trial), "params": "{}", "settings": "{}"}
        )
    assert (
        f"its weights: {run_dir.path}/front/4.safetensors"
        in hpo("best", run_dir.path, "--by", "parameters")[2]
    )
    assert f"the weights of trial 1: {run_dir.best_weights}" in hpo("best", run_dir.path)[2]
    table = (
        render_report(RunReader(run_dir.path), 3, START_SECONDS)
        .split('<section id="answer">')[1]
        .split("</table>")[0]
    )
    assert re.findall(r"<td>(front/[^<]*)</td>", table) == ["front/4.safetensors"]


def test_show_prints_membership_in_the_front(tmp_path: Path, hpo: Hpo) -> None:
    path = make_front_run(tmp_path / "run").run_dir.path
    said = {
        trial: re.findall("^front +(.*)", hpo("show", path, trial)[1], re.MULTILINE)
        for trial in range(7)
    }
    on, off = (
        "on it: no other individual dominates it",
        "not on it: trial {} is as good or better in all objectives",
    )
    assert said == {0: [on], 1: [off.format(3)], 2: [off.format(3)], 3: [on], 4: [on], 5: [], 6: []}
    as_json = [json.loads(hpo("show", path, trial, "--json")[1])["front"] for trial in range(7)]
    assert as_json == [True, False, False, True, True, False, False]


def test_export_has_a_column_for_the_front(tmp_path: Path) -> None:
    table = make_evaluation_table(make_front_run(tmp_path / "run"))
    assert list(table.column_types)[3:5] == ["loss", "front"]
    rows = list(csv.DictReader(io.StringIO(find_writer("csv")(table).decode())))
    assert [row["front"] for row in rows] == [
        "True",
        "False",
        "False",
        "True",
        "True",
        "False",
        "False",
    ]
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    column = pyarrow.parquet.read_table(io.BytesIO(find_writer("parquet")(table)))["front"]
    assert (str(column.type), column.to_pylist()) == (
        "bool",
        [True, False, False, True, True, False, False],
    )


def test_live_view_shows_the_front_instead_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = make_front_run(tmp_path / "run", THREE_OBJECTIVES).take_snapshot()
    run = compute_run_status(look)
    seen = [line.plain for line in format_header(run, Path("run"))]
    index = next(count for count, line in enumerate(seen) if "lowest loss" in line)
    assert seen[index].startswith("front 5  lowest loss 0.25  trial 1, found ")
    assert seen[index + 2] == "loss 0.25 to 1000, parameters 50 to 300, speed 1 to 9"
    assert make_island_rows(run).cells(0) == ("0", "7", "1", "0.25", "1"), (
        "the best of an island must be its lowest loss"
    )
    monkeypatch.setattr("hpo.views.live.run_watch.SECONDS_BETWEEN_ESTIMATES", -1.0)
    (line,) = RunListing(look, Path("run")).format_lines(run)
    assert line.startswith("-- front of 5, lowest loss 0.25 (trial 1: layers=1  ")


def test_advice_with_several_objectives_omits_the_winner() -> None:
    near = [make_evaluation(0, loss=0.5), make_evaluation(1, loss=0.5001)]
    several = {"budget": 2, "objectives": {"names": ["loss", "parameters"], "maximized": []}}
    assert find_by_kind(make_result(near, {"budget": 2}), "confirm")
    assert find_by_kind(make_result(near, several), "confirm") is None


def find_trace(figure: Any, name: str) -> dict[str, Any]:
    """Return the trace of a figure by its name."""
    (found,) = [evaluation for evaluation in figure.data if evaluation["name"] == name]
    return dict(found)


def test_front_figure_has_stairs_to_the_better_side(tmp_path: Path) -> None:
    evaluations = make_front_run(tmp_path / "run", THREE_OBJECTIVES).read_evaluations()
    sizes, speeds = draw_fronts(evaluations, THREE_OBJECTIVES)
    assert list(zip(*(find_trace(sizes, "front")[way] for way in "xy"), strict=True))[:2] == [
        (0.25, 200),
        (0.5, 100),
    ]
    assert find_trace(sizes, "front")["line"]["shape"] == "hv"
    assert find_trace(speeds, "front")["y"] == [3, 7, 9], (
        "more is better, and 3 dominates 2 with the same loss"
    )
    assert speeds.layout["yaxis"]["title"]["text"] == "speed (maximised)"
    assert len(find_trace(sizes, "on the front")["x"]) == 5
    assert find_trace(sizes, "on the front")["text"][0].startswith(
        "trial 1: loss 0.25<br>parameters 300<br>speed 3<br>"
    )


def test_front_figure_has_fronts_after_fewer_evaluations() -> None:
    evaluations = make_tradeoffs(
        [(1.0, 8), (2.0, 2), (0.5, 9), (0.4, 8), (0.3, 3), (0.2, 5), (0.6, 1), (0.1, 9)]
    )
    (figure,) = draw_fronts(
        [*evaluations, make_evaluation(8, "failed", started=-5.0, ended=-1.0)], TWO_OBJECTIVES
    )
    assert find_trace(figure, "after 2 evaluations")["x"] == [1.0], (
        "the failed trial ended first, and counts"
    )
    assert find_trace(figure, "after 4 evaluations")["x"] == [0.5, 1.0, 2.0]
    assert find_trace(figure, "front")["x"] == [0.1, 0.2, 0.3, 0.6]
    assert find_trace(figure, "dominated")["x"] == [1.0, 2.0, 0.5, 0.4]
    assert draw_fronts(evaluations[:2], TWO_OBJECTIVES)[0].data[-2]["name"] == "front", (
        "two trials are too few for an earlier front"
    )
    assert draw_fronts([make_evaluation(0, "failed")], TWO_OBJECTIVES) == []


def test_front_figure_scale_leaves_room_for_the_front() -> None:
    found = [(2.1, 200.0), (2.12, 100.0), (2.2, 20.0)]
    evaluations = make_tradeoffs(
        [*found, (2.5, 60.0), (2.4, 300.0), (3.1, 90.0), (9.0, 20.0), (25.0, 50.0), (50.0, 20.0)]
    )
    (figure,) = draw_fronts(evaluations, TWO_OBJECTIVES)
    assert "go beyond the scale of loss, up to 50" in figure.out_of_range_note
    low, high = figure.layout["xaxis"]["range"]
    assert (2.2 - low) / (high - low) > 0.1
    assert set(find_trace(figure, "on the front")["marker"]["symbol"]) == {"circle"}
    (whole,) = draw_fronts(make_tradeoffs([*found, (2.5, 60.0)]), TWO_OBJECTIVES)
    assert whole.out_of_range_note == ""


def test_front_figure_clips_diverged_evaluations() -> None:
    near = [(0.1 + 0.05 * n, 1e6 / (1 + n) ** 3) for n in range(12)]
    evaluations = make_tradeoffs([*near, (1e9, 2e6), (2e9, 1.0)])
    (figure,) = draw_fronts(evaluations, TWO_OBJECTIVES)
    assert figure.layout["yaxis"]["type"] == "log"
    low, high = figure.layout["xaxis"]["range"]
    assert 0 < low < 0.1
    assert 0.65 < high < 1
    dominated, best = find_trace(figure, "dominated"), find_trace(figure, "on the front")
    assert dominated["marker"]["symbol"] == ["triangle-right"]
    assert best["marker"]["symbol"] == ["circle"] * 12 + ["triangle-right"]
    assert dominated["x"] == best["x"][-1:] == find_trace(figure, "front")["x"][-1:]
    assert figure.out_of_range_note.startswith(
        "2 evaluations go beyond the scale of loss, up to 2000000000: "
    )


def test_front_figure_clips_a_maximised_objective_downwards() -> None:
    score = Objectives(("loss", "score"), ("score",))
    evaluations = make_tradeoffs(
        [*((1.0 + n, -(2.0 ** (10 - n))) for n in range(11)), (50.0, -1e12)]
    )
    (figure,) = draw_fronts(evaluations, score)
    axis, stairs = figure.layout["yaxis"], find_trace(figure, "front")
    assert axis["type"] == "log", "the axis has absolute values"
    assert axis["range"][0] > axis["range"][1], "the best must be at the top"
    assert dict(zip(axis["tickvals"], axis["ticktext"], strict=True))[100.0] == "-100"
    assert stairs["y"] == [2.0 ** (10 - n) for n in range(11)]
    assert find_trace(figure, "dominated")["marker"]["symbol"] == ["triangle-down"]
    assert "down to -1000000000000" in figure.out_of_range_note


def test_hypervolume_figure_ends_at_the_summary(tmp_path: Path) -> None:
    run = make_front_run(tmp_path / "run")
    figure = draw_hypervolume(run.read_evaluations(), TWO_OBJECTIVES)
    assert figure is not None
    (line,) = figure.data
    hypervolume = run.make_summary(1).hypervolume
    assert hypervolume is not None
    assert line["y"][-1] == pytest.approx(hypervolume.share, abs=1e-4)
    assert line["y"] == sorted(line["y"])
    assert (line["x"][0], line["x"][-1]) == (1, 7)
    assert draw_hypervolume(run.read_evaluations(), Objectives()) is None
    assert draw_hypervolume(run.read_evaluations()[:1], TWO_OBJECTIVES) is None


@pytest.mark.parametrize("objectives", [TWO_OBJECTIVES, THREE_OBJECTIVES])
def test_shares_over_time_equal_those_of_each_front(objectives: Objectives) -> None:
    rng, others = random.Random(0), len(objectives.metric_names)
    evaluations = [
        make_evaluation(
            n,
            loss=rng.random(),
            other_values=tuple(rng.choice((rng.random(), 0.5)) for _ in range(others)),
        )
        for n in range(80)
    ]
    evaluations[5] = replace(evaluations[5], imported_from="trial 1 of other")
    box, grown = (
        make_box(evaluations, objectives),
        compute_shares_over_time(evaluations, objectives),
    )
    assert box is not None
    assert len(grown) > 5
    for count, share in grown:
        own = [entry for entry in evaluations if not entry.imported_from][:count]
        best = find_front([evaluations[5], *own], objectives)
        assert share == pytest.approx(box.compute_share(compute_costs(best, objectives)), abs=1e-9)


def test_report_answers_with_the_front(tmp_path: Path) -> None:
    page = render_report(make_front_run(tmp_path / "run", THREE_OBJECTIVES), 2, START_SECONDS)
    assert "<title>run: front of 5, lowest loss 0.25</title>" in page
    answer = page.split('<section id="answer">')[1].split("</section>")[0]
    assert "<h2>The front</h2>" in answer
    assert "runner-up" not in page
    assert "How sure?" not in answer
    table = answer.split('<table class="sortable">')[1].split("</table>")[0]
    heads = re.findall(r"<th [^>]*>([^<]*)</th>", table)
    assert heads == [
        "loss",
        "parameters",
        "speed",
        "accuracy",
        "layers",
        "activation",
        "lr",
        "gamma",
        "trial",
    ]
    assert len(re.findall("<tr>", table)) == 1 + 5
    assert re.findall(r'class="plot" id="([^"]*)"', answer) == ["front-1", "front-2", "hypervolume"]


@pytest.mark.parametrize(
    "states", [[], [TrialState.FAIL], [TrialState.COMPLETE], [TrialState.RUNNING]]
)
def test_views_show_a_front_of_one_or_none(
    tmp_path: Path, hpo: Hpo, states: list[TrialState]
) -> None:
    record = make_run(tmp_path / "run", objectives=TWO_OBJECTIVES)
    for state in states:
        add_evaluation(
            record,
            state,
            metrics={"parameters": 10.0},
            failure="no" if state == TrialState.FAIL else None,
        )
    run = RunReader(tmp_path / "run")
    count = states.count(TrialState.COMPLETE)
    assert len(run.make_summary(3).front) == count
    assert ("1 individual: no other one is better" in hpo("top", tmp_path / "run")[1]) == bool(
        count
    )
    assert ("it alone is on the front" in hpo("best", tmp_path / "run")[2]) == bool(count)
    assert hpo("best", tmp_path / "run", "--by", "parameters")[0] == (0 if count else 2)
    assert ("front of 1" in render_report(run, 3, START_SECONDS)) == bool(count)
    head = format_header(compute_run_status(run.take_snapshot()), Path("run"))
    assert any(line.plain == "loss 0.5, parameters 10" for line in head) == bool(count)
    assert RunDir(tmp_path / "run").front_weights.exists() is False, "readers must not write"
