"""Test `hpo.results.cost`."""

from __future__ import annotations

import math

import pytest

from hpo.results.cost import Cost, compute_cost
from hpo.store.evaluations import Evaluation
from hpo.views.result_text import format_cost
from tests.support.evaluations import make_evaluation

HOUR = 3600.0
TWO_RANKS = {"hosts": {"a": 1, "b": 1}, "gpus": {"a": ["0"], "b": ["0", "1"]}}


def make_timed(trial: int, state: str, hours: float, **values: object) -> Evaluation:
    return make_evaluation(trial, state, seconds=hours * HOUR, **{**TWO_RANKS, **values})


def test_hours_of_ranks_and_gpus_are_added_once_by_outcome() -> None:
    evaluations = [
        make_timed(0, "complete", 1.0),
        make_timed(1, "promoted", 2.0),
        # It has resumed after the two hours of trial 1.
        make_timed(2, "complete", 5.0, retry_of=1, seconds_before=2 * HOUR),
        make_timed(3, "interrupted", math.nan),
        # Only this trial shows that trial 3 has trained for 1.5 hours.
        make_timed(
            4, "pruned", 2.0, retry_of=3, seconds_before=1.5 * HOUR, hosts={"a": 4}, gpus={}
        ),
        make_timed(5, "failed", 0.5),
        make_timed(6, "running", 0.0),
        make_timed(7, "complete", 9.0, imported_from="another"),
        make_timed(8, "complete", 9.0, hosts={}, gpus={}),  # It was recorded without its ranks.
    ]
    cost = compute_cost(evaluations, [make_timed(0, "failed", 1.0)])
    ranks = {"complete": 2 * 4.0, "stopped early": 2 * 2.0 + 4 * 2.0, "failed or lost": 2 * 0.5}
    assert cost.rank_hours == pytest.approx({**ranks, "confirmations": 2.0})
    gpus = {"complete": 3 * 4.0, "stopped early": 3 * 2.0, "failed or lost": 3 * 0.5}
    assert cost.gpu_hours == pytest.approx({**gpus, "confirmations": 3.0})
    assert format_cost(cost) == (
        "22.5 GPU hours in all sessions: 12.0 complete, 6.0 stopped early, 1.5 failed or lost, "
        "3.0 confirmations; as many evaluations again would take about 19.5"
    )


def test_cost_without_gpus_is_in_hours_of_ranks() -> None:
    cost = compute_cost([make_timed(0, "complete", 0.06, gpus={})])
    assert format_cost(cost) == (
        "0.120 rank hours in all sessions: 0.120 complete; as many evaluations again would take "
        "about 0.120"
    )
    # Only confirmations that the plan of this session has are given: here not trial 1.
    later = make_timed(2, "complete", 0.5, retry_of=1, seconds_before=360.0, gpus={})
    assert compute_cost([], [later]).rank_hours == {"confirmations": 1.0}
    assert format_cost(Cost({"complete": 0.09}, {})) == ""
