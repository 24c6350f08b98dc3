"""Test that numbers have enough digits in all tables, lines and headers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.results.run_snapshot import RunSnapshot
from hpo.results.summary import Summary
from hpo.store.evaluations import Evaluation
from hpo.text_format import format_number, format_numbers
from hpo.views.live.run_status import compute_run_status, format_header
from hpo.views.progress import ProgressLines
from hpo.views.summary_tables import print_tables
from tests.support.evaluations import make_evaluation
from tests.support.runs import make_manifest


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (110300.0, "110300"),
        (110300, "110300"),
        (-110300.0, "-110300"),
        (1.0, "1"),
        (0.0, "0"),
        (-0.0, "0"),
        (110300.4, "110300"),
        (-1000003.2, "-1000003"),
        (1234567890.5, "1.235e+09"),
        (0.031249, "0.03125"),
        (2.0**53 - 1, "9007199254740991"),
        (2.0**53, "9.007e+15"),
        (-(2.0**53), "-9.007e+15"),
        (1e300, "1e+300"),
        (5e-324, "4.941e-324"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_format_number_keeps_digits_of_integers(number: float, text: str) -> None:
    assert format_number(number) == text


def make_complete(trial: int, loss: float, parameters: float) -> Evaluation:
    return make_evaluation(trial, loss=loss, metrics={"parameters": parameters, "accuracy": 0.5})


def test_parameter_counts_are_exact_in_all_views(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluations = [
        make_complete(0, 0.25, 110300.0),
        make_complete(1, 0.5, 2.0**53 - 1),
        make_complete(2, 0.75, 8.0),
    ]
    lines = ProgressLines([], 3)
    texts = [lines.format_line(evaluation) for evaluation in evaluations]
    assert "  parameters=110300  accuracy=0.5" in texts[0]
    assert texts[1].index("accuracy") == texts[2].index("accuracy"), (
        "columns keep the largest width so far"
    )
    print_tables(Summary(evaluations, make_manifest(budget=3), 3), Path("run"))
    table = capsys.readouterr().out.split("The best")[1].splitlines()
    assert table[3].split()[:4] == ["1", "0.25", "0.5", "110300"]
    end = table[1].index("parameters") + len("parameters")
    assert [line[:end].split()[-1] for line in table[3:6]] == ["110300", "9007199254740991", "8"]
    run = compute_run_status(
        RunSnapshot(9.0, make_manifest(budget=3), evaluations, [], is_in_use=False)
    )
    shown = [line.plain for line in format_header(run, Path("run"))]
    assert "lr=0.1  parameters=110300  accuracy=0.5" in shown


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1.000003, 1.000007, 2.5], ["1.000003", "1.000007", "2.5"]),
        ([-1000000.25, -1000000.5], ["-1000000.25", "-1000000.5"]),
        ([-999998.2, None, -1e6, -1e6], ["-999998", "", "-1000000", "-1000000"]),
        ([0.12345, 0.12346], ["0.12345", "0.12346"]),
        ([0.3, 0.1 + 0.2], ["0.3", "0.3"]),  # They differ in the 17th digit.
        ([math.inf, math.nan, 1.5], ["inf", "nan", "1.5"]),
        ([], []),
    ],
)
def test_format_numbers_distinguishes_values(values: list[float | None], texts: list[str]) -> None:
    assert format_numbers(values) == texts


def test_print_tables_distinguishes_close_losses(capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = [
        make_complete(trial, loss, 8.0) for trial, loss in enumerate([1.000007, 1.000003, 1.2])
    ]
    print_tables(Summary(evaluations, make_manifest(budget=3), 3), Path("run"))
    table = capsys.readouterr().out.split("The best")[1].splitlines()
    assert [line.split()[1] for line in table[3:6]] == ["1.000003", "1.000007", "1.2"]


@pytest.mark.parametrize(("budget", "counted"), [(4, "3 complete, of 4\n"), (2, "3 complete\n")])
def test_print_tables_names_a_budget_that_is_not_exceeded(
    capsys: pytest.CaptureFixture[str], budget: int, counted: str
) -> None:
    evaluations = [make_complete(trial, trial / 8, 8.0) for trial in range(3)]
    print_tables(Summary(evaluations, make_manifest(budget=budget), 3), Path("run"))
    assert f"\n{counted}" in capsys.readouterr().out


def test_print_tables_says_whether_a_run_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    running = replace(make_complete(0, 0.5, 8.0), state="running")
    summary = Summary([running], make_manifest(budget=2), 3)
    print_tables(summary, Path("run"))
    assert "\n1 running, of 2\n" in capsys.readouterr().out
    print_tables(summary, Path("run"), is_active=False)
    assert "\n1 running when the run ended, of 2\n" in capsys.readouterr().out
