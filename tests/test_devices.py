"""Which GPUs a rank takes; on what they compute is not tried here, where there are none."""

from __future__ import annotations

import pytest

from hpo.evaluation.devices import share_of


@pytest.mark.parametrize(
    ("gpus_of_ranks", "shares"),
    [
        ([("a", "b")] * 2, [[0], [1]]),
        ([("a", "b", "c", "d")] * 2, [[0, 1], [2, 3]]),
        ([("a", "b", "c")] * 2, [[0], [1]]),  # evenly: one is left over
        ([("a", "b")] * 4, [[0], [1], [0], [1]]),
        ([("a",), ("b",)], [[0], [0]]),  # each sees its own
        ([("a", "b"), ("c", "d")], [[0, 1], [0, 1]]),
        ([("a", "b"), ("c", "d"), ("a", "b"), ("c", "d")], [[0], [0], [1], [1]]),
    ],
)
def test_ranks_of_a_host_divide_the_gpus_that_they_see(
    gpus_of_ranks: list[tuple[str, ...]], shares: list[list[int]]
) -> None:
    assert [list(share_of(gpus_of_ranks, rank)) for rank in range(len(gpus_of_ranks))] == shares
