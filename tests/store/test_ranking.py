"""Test rankings at rungs, to which individuals are added in turn, against definitions."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpo.dominance import compute_domination_ranks
from hpo.store.ranking import Ranking, make_ranking

steps = st.integers(2, 3).flatmap(
    lambda objectives: st.lists(
        st.tuples(st.booleans(), st.tuples(*[st.integers(0, 4)] * objectives), st.integers(0, 99)),
        max_size=25,
    )
)


def apply_steps(
    steps: list[tuple[bool, tuple[int, ...], int]],
) -> tuple[Ranking, dict[int, tuple[int, ...]]]:
    """Add an individual to a ranking at each step, or remove one.

    Return the ranking, and the costs of its individuals.
    """
    ranking = make_ranking(2)
    costs: dict[int, tuple[int, ...]] = {}
    for root, (removes, values, drawn) in enumerate(steps):
        if removes and costs:
            removed = sorted(costs)[drawn % len(costs)]
            ranking.remove(removed)
            del costs[removed]
        else:
            costs[root] = values
            ranking.add(root, tuple(map(float, values)))
    return ranking, costs


@given(steps)
@settings(deadline=None)
def test_dominance_ranking_step_by_step_equals_sorting_at_once(
    steps: list[tuple[bool, tuple[int, ...], int]],
) -> None:
    ranking, costs = apply_steps(steps)
    layer = (
        dict(
            zip(
                costs,
                compute_domination_ranks(np.array(list(costs.values()), float)).tolist(),
                strict=True,
            )
        )
        if costs
        else {}
    )
    expected = sorted((layer[root], float(costs[root][0]), root) for root in costs)
    assert ranking.entries == [(loss, root) for _, loss, root in expected]
    assert len(ranking) == len(costs)


@given(steps, st.integers(0, 12))
@settings(deadline=None)
def test_best_candidates_come_layer_by_layer(
    steps: list[tuple[bool, tuple[int, ...], int]], count: int
) -> None:
    ranking, costs = apply_steps(steps)
    candidates = {root for root in costs if root % 2}
    chosen = ranking.select_best(count, candidates, ())
    assert {root for root in candidates if ranking.is_best(root, count, candidates, ())} == set(
        chosen
    )
    layer = (
        dict(
            zip(
                costs,
                compute_domination_ranks(np.array(list(costs.values()), float)).tolist(),
                strict=True,
            )
        )
        if costs
        else {}
    )
    assert [layer[root] for root in chosen] == sorted(layer[root] for root in chosen)
    for root in candidates - set(chosen):
        assert sum(layer[other] <= layer[root] for other in costs) > count, (
            "a layer that fits must be selected completely"
        )
    assert len(chosen) <= count
    found = ranking.find_next(candidates, ())
    assert (found is None) == (not candidates)
    if found is not None:
        position, root = found
        assert root in ranking.select_best(position + 1, candidates, ())
        assert not ranking.select_best(position, candidates, ())


def test_last_layer_takes_continued_then_farthest() -> None:
    ranking = make_ranking(2)
    front = [(0.0, 10.0), (1.0, 9.0), (2.0, 8.0), (6.0, 2.0), (10.0, 0.0)]
    for root, costs in enumerate(front):
        ranking.add(root, costs)
    ranking.add(9, (11.0, 11.0))
    assert ranking.select_best(1, range(5), ()) == [0], (
        "the lowest loss comes first while none has continued"
    )
    assert ranking.select_best(3, range(1, 5), ()) == [4, 3], (
        "0 has continued, so the other end and then the middle follow"
    )
    assert ranking.select_best(3, (1, 2, 3), ()) == [3], "0 and 4 have continued"
    assert ranking.select_best(2, (1, 2, 3), ()) == []
    assert ranking.select_best(2, (1, 2, 3), (4,)) == [3], "4 was stopped, and has not continued"
    assert ranking.select_best(5, (1, 3, 9), ()) == [1, 3]
    assert ranking.find_next((1, 2, 3, 9), ()) == (2, 3)
    assert ranking.find_next((9,), ()) == (5, 9)


@pytest.mark.parametrize("objectives", [1, 2])
def test_individual_behind_never_becomes_best(objectives: int) -> None:
    """An individual is behind if at least 30 others will always rank before it.

    So its checkpoint may be deleted.
    """
    drawn = random.Random(3)
    ranking = make_ranking(objectives)
    behind: set[int] = set()
    for root in range(200):
        ranking.add(root, tuple(drawn.random() for _ in range(objectives)))
        now = {member for member in range(root + 1) if ranking.is_behind(member, 30)}
        assert now >= behind
        assert not now & set(ranking.select_best(30, range(root + 1), ()))
        assert set(ranking.find_behind(30)) <= now
        behind = now
    assert 10 < len(behind) < 180
