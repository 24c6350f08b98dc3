"""Test hpo compare: the table of runs, and the sentences about their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from hpo.results.summary import Summary
from hpo.views.comparison import format_comparison
from tests.support.evaluations import make_evaluation
from tests.support.launch import Hpo
from tests.support.runs import MANIFEST_CONTENT, add_search, make_manifest, make_run


def make_summary(
    loss: float, confirmed: Sequence[float] = (), ranks: int = 2, **about: Any
) -> Summary:
    """Return the summary of a run whose trial 3 is the best, with its losses over other seeds.

    Trials start at 0 to 4 s since the epoch.
    """
    evaluations = [
        make_evaluation(
            trial, loss=loss if trial == 3 else loss + 1.0, seconds=3600.0, hosts={"a": ranks}
        )
        for trial in range(5)
    ]
    confirmations = [
        make_evaluation(
            number, loss=value, confirms=3, seed=number, seconds=0.0, hosts={"a": ranks}
        )
        for number, value in enumerate(confirmed)
    ]
    return Summary(evaluations, make_manifest(**about), 1, confirmations)


def test_comparison_names_the_better_run_by_welch() -> None:
    ours = [0.30, 0.32, 0.31, 0.33]
    theirs = [0.20, 0.24, 0.22]
    runs = {"old": make_summary(0.1, ours), "new": make_summary(0.15, theirs)}
    table, _, sentences = format_comparison(runs).partition("\n\n")
    rows = [line.split() for line in table.splitlines()[2:4]]
    assert rows == [
        ["old", "5", "0.1", "3", "3", "0.315", "0.01291", "4", "10"],
        ["new", "5", "0.15", "3", "3", "0.22", "0.02", "3", "10"],
    ]
    interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    text = " ".join(sentences.split())
    assert "new is better: with many seeds, its mean loss is lower than that of old by " in text
    assert f"{interval.low:.4g} to {interval.high:.4g} (95% confidence)" in text
    assert "differ in" not in text


def test_comparison_does_not_choose_by_luck() -> None:
    lucky = make_summary(0.1, [0.3, 0.5, 0.4])
    other = make_summary(0.2, [0.35, 0.45, 0.39])
    text = " ".join(format_comparison({"a": lucky, "b": other}).split())
    assert "The mean losses of a and b may be equal" in text
    text = " ".join(format_comparison({"a": lucky, "b": make_summary(0.2, [0.3])}).split())
    assert "train the best of b with other seeds: --resume --confirm-seeds 5." in text
    assert "better" not in text
    equal = make_summary(0.2, [0.3, 0.3, 0.3])
    assert "The mean losses of a and b may be equal" in format_comparison({"a": lucky, "b": equal})


def test_comparison_tells_what_makes_losses_different() -> None:
    other = make_summary(
        0.1,
        ranks=4,
        settings={"epochs": 3, "width": 8},
        space={"lr": "Float(0.1, 1.0)"},
    )
    text = format_comparison({"a": make_summary(0.1), "b": other})
    assert "a and b differ in the ranks per worker (2 and 4): their losses may not be" in text
    assert "a and b differ in the settings epochs and width" in text
    assert "a and b search other values of lr." in text
    programs = [f"hpo search --loss x -- train.py --epochs {epochs}" for epochs in (3, 8)]
    ours, theirs = (make_summary(0.1, command=program) for program in programs)
    text = format_comparison({"a": ours, "b": theirs})
    assert "a and b differ in the program (train.py --epochs 3 and train.py --epochs 8)" in text
    ours, theirs = (
        make_summary(0.1, search_space=f"/spaces/{name}.py", space={name: "Int(0, 1)"})
        for name in ("cnn", "mlp")
    )
    text = format_comparison({"a": ours, "b": theirs})
    assert "a and b differ in the program (cnn.py and mlp.py)" in text
    assert "Only one of a and b has cnn and mlp." in text
    assert "other values" not in text
    several = {"names": ["loss", "size"], "maximized": []}
    scores = make_summary(0.1, objectives=several)
    text = format_comparison({"a": make_summary(0.1), "b": scores})
    assert text.endswith("a and b differ in their objectives: their losses cannot be compared.")
    none = replace(make_summary(0.1), evaluations=[])
    text = format_comparison({"a": make_summary(0.1), "b": none})
    assert "a and b: b has no complete evaluation." in text


def test_comparison_is_of_trials_and_not_of_the_last_session() -> None:
    layout = {"ranks": 3, "ranks_per_worker": 1, "islands": 1}
    sessions = [
        {**MANIFEST_CONTENT["sessions"][0], "started": start, "settings": {"epochs": epochs}}
        for start, epochs in (("1970-01-01T00:00:00+00:00", 4), ("1970-01-01T00:00:04+00:00", 9))
    ]
    resumed = make_summary(0.2, layout=layout, sessions=sessions, settings={"epochs": 9})
    text = format_comparison({"a": make_summary(0.1), "b": resumed})
    assert "differ in" not in text, "trial 3, the best, had 2 ranks and 4 epochs"
    text = format_comparison({"a": make_summary(0.1, ranks=1), "b": resumed})
    assert "a and b differ in the ranks per worker (1 and 2)" in text
    text = format_comparison({"a": make_summary(0.1, settings={"epochs": 9}), "b": resumed})
    assert "a and b differ in the setting epochs" in text
    ours, theirs = (make_summary(0.1, [0.3, 0.4], ranks) for ranks in (2, 4))
    text = format_comparison({"a": ours, "b": replace(ours, confirmations=theirs.confirmations)})
    assert "a and b differ in the ranks per worker (2 and 4)" in text, "of the confirmations"


def test_compare_prints_runs_and_refuses_one(
    hpo: Hpo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("first", 10), ("second", 20)):
        add_search(make_run(tmp_path / name), count)
    status, printed, errors = hpo("compare", "first", "second")
    assert (status, errors) == (0, "")
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["first", "second"]
    status, printed, errors = hpo("compare", "first")
    assert (status, printed) == (2, "")
    assert errors == "error: hpo compare needs two different runs, got only first\n"
