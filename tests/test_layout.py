from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.errors import UsageError
from hpo.layout import Layout


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_every_rank_has_one_worker_and_every_worker_one_island(workers: int, size: int, data: st.DataObject) -> None:
    islands = data.draw(st.integers(1, workers))
    layout = Layout(workers * size, size, islands)
    assert [layout.worker_of(rank) for rank in range(layout.ranks)] == [w for w in range(workers) for _ in range(size)]
    sizes = [layout.island_size(island) for island in range(islands)]
    assert sum(sizes) == workers
    assert max(sizes) - min(sizes) <= 1
    homes = [layout.island_of(worker) for worker in range(workers)]
    assert homes == [island for island, count in enumerate(sizes) for _ in range(count)]
    assert [homes.index(island) for island in range(islands)] == [layout.first_worker(i) for i in range(islands)]


@pytest.mark.parametrize(
    ("ranks", "size", "islands", "shown"),
    [
        (8, 3, 2, ["8 ranks", "workers of 3", "mpirun -n 9", "--ranks-per-worker 2"]),
        (1, 2, 1, ["1 rank ", "workers of 2", "mpirun -n 2", "--ranks-per-worker 1"]),
        (8, 2, 5, ["--islands 5", "4 workers", "mpirun -n 10", "--islands 4"]),
        (8, 0, 2, ["--ranks-per-worker", "at least 1", "not 0"]),
        (8, 2, 0, ["--islands", "at least 1", "not 0"]),
    ],
)
def test_what_does_not_fit_together_says_what_would(ranks: int, size: int, islands: int, shown: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Layout(ranks, size, islands)
    assert [text for text in shown if text not in str(raised.value)] == []
