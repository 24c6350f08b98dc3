"""Dominance, crowding and hypervolume, beside what follows from their definitions."""

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

few = st.integers(1, 3).flatmap(
    lambda objectives: st.lists(st.lists(st.integers(0, 4), min_size=objectives, max_size=objectives), max_size=12)
)


def dominates(one: Costs, other: Costs) -> bool:
    return bool((one <= other).all() and (one < other).any())


def table(rows: list[list[int]]) -> Costs:
    return np.array(rows, float).reshape(len(rows), len(rows[0]) if rows else 2)


@given(few)
@settings(deadline=None)
def test_layers_are_what_is_left_when_those_before_are_taken_away(rows: list[list[int]]) -> None:
    costs = table(rows)
    expected = [not any(dominates(other, own) for other in costs) for own in costs]
    assert find_non_dominated(costs).tolist() == expected
    layer = compute_domination_ranks(costs)
    for own, of in zip(costs, layer, strict=True):
        above = [layer[place] for place, other in enumerate(costs) if dominates(other, own)]
        assert of == max(above, default=-1) + 1
    some = compute_domination_ranks(costs, most_ranked=2)
    assert ((some == layer) | (some == some.max(initial=0))).all()
    assert layer[sort_best_first(costs)].tolist() == sorted(layer)


@given(few)
@settings(deadline=None)
def test_hypervolume_is_the_number_of_unit_cubes_that_are_dominated(rows: list[list[int]]) -> None:
    costs = table(rows)
    objectives = costs.shape[1]
    corners = itertools.product(range(4), repeat=objectives)  # of cubes, up to the reference at 4
    expected = sum(any((own <= corner).all() for own in costs) for corner in map(np.array, corners))
    assert compute_hypervolume(costs, np.full(objectives, 4.0)) == pytest.approx(expected)


def test_who_is_alone_is_crowded_least() -> None:
    costs = np.array([[0.0, 10.0], [1.0, 9.0], [2.0, 8.0], [6.0, 2.0], [10.0, 0.0]])
    apart = compute_crowding_distances(costs)
    assert apart[[0, 4]].tolist() == [math.inf] * 2
    assert apart[1:4].tolist() == pytest.approx([0.2 + 0.2, 0.5 + 0.7, 0.8 + 0.8])
    assert sort_best_first(np.vstack([costs, [[6.0, 3.0]]])).tolist() == [0, 4, 3, 2, 1, 5]
    assert compute_crowding_distances(np.array([[1.0, 1.0], [1.0, 1.0]])).tolist() == [0.0, 0.0]


def test_failures_come_last_and_the_largest_floats_do_not_overflow() -> None:
    costs = np.array([[math.inf, math.inf], [-1.7e308, 1.7e308], [1.7e308, -1.7e308], [0.0, 0.0]])
    assert sort_best_first(costs)[-1] == 0
    assert find_non_dominated(costs).tolist() == [False, True, True, True]
    assert compute_hypervolume(costs, np.array([1.0, 1.0])) == 1.0
    assert compute_hypervolume(costs[:1], np.array([1.0, 1.0])) == 0.0


def test_the_best_of_one_objective_come_first_in_their_order_and_nobody_is_lost() -> None:
    draws = np.random.default_rng(0)
    for number in (0, 1, 5, 40):
        costs = draws.choice(np.array([0.0, 0.5, 0.5, 1.0, 2.0, np.inf]), size=(number, 1))
        whole = sort_best_first(costs)
        assert whole.tolist() == np.argsort(costs[:, 0], kind="stable").tolist()
        for most in (1, 3, 7, 40, 99):
            order = sort_best_first(costs, most)
            assert order[:most].tolist() == whole[:most].tolist()
            assert sorted(order.tolist()) == list(range(number))
