"""Test dominance, crowding and hypervolume against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpo.dominance import (
    Costs,
    compute_crowding_distances,
    compute_domination_ranks,
    compute_hypervolume,
    find_non_dominated,
    sort_best_first,
)

cost_rows = st.integers(1, 3).flatmap(
    lambda objectives: st.lists(
        st.lists(st.integers(0, 4), min_size=objectives, max_size=objectives), max_size=12
    )
)


def dominates(first: Costs, second: Costs) -> bool:
    return bool((first <= second).all() and (first < second).any())


def make_costs(rows: list[list[int]]) -> Costs:
    return np.array(rows, float).reshape(len(rows), len(rows[0]) if rows else 2)


@given(cost_rows)
@settings(deadline=None)
def test_domination_ranks_follow_their_definition(rows: list[list[int]]) -> None:
    costs = make_costs(rows)
    expected = [not any(dominates(other, own) for other in costs) for own in costs]
    assert find_non_dominated(costs).tolist() == expected
    layer = compute_domination_ranks(costs)
    for own, rank in zip(costs, layer, strict=True):
        above = [layer[index] for index, other in enumerate(costs) if dominates(other, own)]
        assert rank == max(above, default=-1) + 1
    limited = compute_domination_ranks(costs, most_ranked=2)
    assert ((limited == layer) | (limited == limited.max(initial=0))).all()
    assert layer[sort_best_first(costs)].tolist() == sorted(layer)


@given(cost_rows)
@settings(deadline=None)
def test_hypervolume_counts_dominated_unit_cubes(rows: list[list[int]]) -> None:
    costs = make_costs(rows)
    objectives = costs.shape[1]
    # Lower corners of unit cubes. The reference is 4.
    corners = itertools.product(range(4), repeat=objectives)
    expected = sum(any((own <= corner).all() for own in costs) for corner in map(np.array, corners))
    assert compute_hypervolume(costs, np.full(objectives, 4.0)) == pytest.approx(expected)


def test_crowding_distances_are_largest_for_isolated_costs() -> None:
    costs = np.array([[0.0, 10.0], [1.0, 9.0], [2.0, 8.0], [6.0, 2.0], [10.0, 0.0]])
    apart = compute_crowding_distances(costs)
    assert apart[[0, 4]].tolist() == [math.inf] * 2
    assert apart[1:4].tolist() == pytest.approx([0.2 + 0.2, 0.5 + 0.7, 0.8 + 0.8])
    assert sort_best_first(np.vstack([costs, [[6.0, 3.0]]])).tolist() == [0, 4, 3, 2, 1, 5]
    assert compute_crowding_distances(np.array([[1.0, 1.0], [1.0, 1.0]])).tolist() == [0.0, 0.0]


def test_sort_best_first_puts_failures_last_without_overflow() -> None:
    costs = np.array([[math.inf, math.inf], [-1.7e308, 1.7e308], [1.7e308, -1.7e308], [0.0, 0.0]])
    assert sort_best_first(costs)[-1] == 0
    assert find_non_dominated(costs).tolist() == [False, True, True, True]
    assert compute_hypervolume(costs, np.array([1.0, 1.0])) == 1.0
    assert compute_hypervolume(costs[:1], np.array([1.0, 1.0])) == 0.0


def test_sort_best_first_of_one_objective_sorts_all() -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 5, 40):
        costs = rng.choice(np.array([0.0, 0.5, 0.5, 1.0, 2.0, np.inf]), size=(count, 1))
        whole = sort_best_first(costs)
        assert whole.tolist() == np.argsort(costs[:, 0], kind="stable").tolist()
        for most in (1, 3, 7, 40, 99):
            order = sort_best_first(costs, most)
            assert order[:most].tolist() == whole[:most].tolist()
            assert sorted(order.tolist()) == list(range(count))
