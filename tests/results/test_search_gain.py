"""Test the expected gain of further evaluations."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from hpo.results.reader import RunReader
from hpo.store.evaluations import Evaluation
from hpo.store.search_gain import estimate_next_gain, is_gain_below
from hpo.views.live.run_status import compute_run_status
from hpo.views.next_gain_text import format_next_gain
from tests.support.evaluations import make_evaluation
from tests.support.runs import add_evaluation, make_run


def make_search(losses: list[float], **values: Any) -> list[Evaluation]:
    return [
        make_evaluation(trial, "complete" if math.isfinite(loss) else "failed", loss=loss, seconds=10.0, **values)
        for trial, loss in enumerate(losses)
    ]


def test_gain_is_the_mean_over_choices_of_evaluations() -> None:
    rng = random.Random(0)
    losses = [rng.uniform(1, 2) for _ in range(40)]
    found = estimate_next_gain(make_search(losses), 50)
    assert found is not None
    assert (found.evaluations, found.seconds) == (5, 50.0)

    def compute_gain(first: int) -> float:
        """Return the mean gain of five evaluations that are chosen from all but the first ones."""
        gains = []
        for _ in range(40_000):
            chosen = set(rng.sample(range(first, 40), 5))
            gains.append(min(loss for index, loss in enumerate(losses) if index not in chosen) - min(losses))
        gain = statistics.fmean(gains)
        return gain / (min(losses) + gain)

    assert found.gain == pytest.approx((compute_gain(20) + compute_gain(0)) / 2, rel=0.05)


def test_gain_is_zero_if_many_are_equally_good() -> None:
    losses = [1.0] * 20 + [2.0] * 20
    found = estimate_next_gain(make_search(losses), 40)
    assert found is not None
    assert found.gain == 0
    assert is_gain_below(0.001, make_search(losses), 40)
    assert not is_gain_below(-math.inf, make_search(losses), 40)


def test_search_does_not_end_because_its_first_is_the_best() -> None:
    losses = [1.0, *(1.5 + 0.1 * math.sin(trial) for trial in range(39))]
    assert not is_gain_below(0.01, make_search(losses), 100)
    assert is_gain_below(0.01, make_search([1.0, 1.001, *losses[1:]]), 40)


def test_negligible_chance_of_no_other_loss_is_ignored() -> None:
    losses = [math.inf] * 140 + [1.0 + trial / 1000 for trial in range(20)]
    found = estimate_next_gain(make_search(losses), 400)
    assert found is not None
    assert found.gain < 0.01, "all 20 are among the 40 that are chosen with a probability of 1e-7"


def test_gain_of_many_evaluations_is_extrapolated() -> None:
    losses = [random.Random(1).uniform(1, 2) for _ in range(40)]
    ten, fifty = (estimate_next_gain(make_search(losses), budget) for budget in (100, 500))
    assert ten is not None
    assert fifty is not None
    assert 1 - fifty.gain == pytest.approx((1 - ten.gain) ** 5)


@pytest.mark.parametrize(
    "evaluations",
    [
        make_search([1.0] * 19 + [math.inf] * 30),
        make_search([math.inf] * 30),
        [*make_search([1.0] * 30), make_evaluation(30, inherits=3)],
        [make_evaluation(trial, imported_from="other") for trial in range(30)],
    ],
    ids=["few complete", "failed", "parents", "imported"],
)
def test_gain_is_unknown(evaluations: list[Evaluation]) -> None:
    assert estimate_next_gain(evaluations, 100) is None
    assert not is_gain_below(0.5, evaluations, 100)


@pytest.mark.parametrize(
    "losses",
    [[1.0] * 19 + [math.inf] * 20 + [1.0], [math.inf] * 30 + [1.0 + trial / 100 for trial in range(20)]],
    ids=["one in the latest half", "only in the latest half"],
)
def test_failures_do_not_end_a_search(losses: list[float]) -> None:
    found = estimate_next_gain(make_search(losses), 100)
    assert found is not None
    assert found.gain < 1 if math.isfinite(losses[0]) else found.gain > 0
    assert is_gain_below(0.001, make_search(losses), 100) == math.isfinite(losses[0])


def test_gain_is_a_share_even_near_zero() -> None:
    for budget in (50, 1000, 100_000):
        found = estimate_next_gain(make_search([math.exp(-trial / 2) for trial in range(40)]), budget)
        assert found is not None
        assert 0 < found.gain <= 1


def test_gain_is_relative_to_a_better_imported_loss() -> None:
    falling = [0.9**trial for trial in range(40)]
    imported = make_evaluation(40, loss=1e-9, imported_from="other")
    found = estimate_next_gain([*make_search(falling), imported], 40)
    assert found is not None
    assert found.gain == 0


def test_exhausted_space_has_no_expected_gain(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    for trial in range(25):
        add_evaluation(record, curve={1: 1 + trial / 25})
    reader = RunReader(tmp_path / "run")
    assert reader.make_summary(3)["next"] is not None
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"exhausted": True}))
    assert reader.make_summary(3)["next"] is None
    assert compute_run_status(reader.make_follower().take_snapshot()).next_gain is None


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (0.0, "The next 6 evaluations are not expected to lower the best loss."),
        (1e-5, "The next 6 evaluations should lower the best loss by less than 0.1%, in 2 min 10 s."),
        (0.014, "The next 6 evaluations should lower the best loss by 1.4%, in 2 min 10 s."),
        (None, ""),
    ],
)
def test_gain_as_text(gain: float | None, text: str) -> None:
    assert format_next_gain({"evaluations": 6, "gain": gain, "seconds": 130.0}) == text


@pytest.mark.slow
def test_estimate_is_right_on_average_for_random_search() -> None:
    """If all evaluations are equally good, the estimate must agree with what is gained, up to the decrease of gains."""
    rng = random.Random(2)
    estimated, gained = [], []
    for _ in range(3000):
        losses = [rng.lognormvariate(0, 1) + 1 for _ in range(66)]
        found = estimate_next_gain(make_search(losses[:60]), 60)
        assert found is not None
        estimated.append(found.gain * min(losses[:60]))
        gained.append(min(losses[:60]) - min(losses))
    assert statistics.fmean(estimated) == pytest.approx(statistics.fmean(gained), rel=0.35)
