"""Test the layout of a job: how ranks are divided into workers and islands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.errors import UsageError
from hpo.layout import Layout, describe_wrong_launch


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_layout_divides_ranks_and_workers_evenly(
    workers: int, size: int, data: st.DataObject
) -> None:
    islands = data.draw(st.integers(1, workers))
    layout = Layout(workers * size, size, islands)
    assert [layout.find_worker(rank) for rank in range(layout.ranks)] == [
        w for w in range(workers) for _ in range(size)
    ]
    sizes = [layout.count_island_workers(island) for island in range(islands)]
    assert sum(sizes) == workers
    assert max(sizes) - min(sizes) <= 1
    found = [layout.find_island(worker) for worker in range(workers)]
    assert found == [island for island, count in enumerate(sizes) for _ in range(count)]
    assert [found.index(island) for island in range(islands)] == [
        layout.find_first_worker(i) for i in range(islands)
    ]


@pytest.mark.parametrize(
    ("ranks", "size", "islands", "shown"),
    [
        (8, 3, 2, ["8 ranks", "workers of 3", "mpirun -n 9", "--ranks-per-worker 2"]),
        (1, 2, 1, ["1 rank ", "workers of 2", "mpirun -n 2", "--ranks-per-worker 1"]),
        (
            8,
            2,
            5,
            [
                "--islands 5 is more",
                "4 workers",
                "mpirun -n 10",
                "--ranks-per-worker 1,",
                "--islands 4",
            ],
        ),
        (
            12,
            6,
            3,
            [
                "2 workers that 12 ranks make",
                "mpirun -n 18",
                "--ranks-per-worker 4,",
                "--islands 2",
            ],
        ),
        (1, 1, 2, ["1 worker that 1 rank makes", "mpirun -n 2 or more, or with --islands 1"]),
        (8, 0, 2, ["--ranks-per-worker", "at least 1", "got 0"]),
        (8, 2, 0, ["--islands", "at least 1", "got 0"]),
    ],
)
def test_layout_with_misfit_numbers_suggests_others(
    ranks: int, size: int, islands: int, shown: list[str]
) -> None:
    with pytest.raises(UsageError) as raised:
        Layout(ranks, size, islands)
    assert [text for text in shown if text not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("ranks", "asked", "propagators", "fitting"),
    [
        (1, (None, None), [], (1, 1)),
        (2, (None, None), [], (2, 1)),
        (3, (None, None), [], (1, 2)),
        (4, (None, None), [], (2, 2)),
        (8, (None, None), ["ga"], (2, 2)),
        (8, (None, None), ["ga", "tpe", "pso"], (2, 3)),
        (8, (8, None), ["ga"], (8, 1)),
        (3, (None, 3), ["ga"], (1, 3)),
        (9, (3, None), ["ga", "tpe", "pso"], (3, 3)),
        (2, (1, None), ["ga", "tpe"], (1, 2)),
    ],
)
def test_choose_without_options_fits_the_ranks(
    ranks: int,
    asked: tuple[int | None, int | None],
    propagators: list[str],
    fitting: tuple[int, int],
) -> None:
    layout = Layout.choose(ranks, *asked, propagators)
    assert (layout.ranks, layout.ranks_per_worker, layout.islands) == (ranks, *fitting)


@pytest.mark.parametrize(
    ("ranks", "asked", "propagators", "message"),
    [
        (
            4,
            (None, None),
            ["ga", "tpe", "pso"],
            "--propagators ga,tpe,pso: each propagator needs its own island, and 3 is more than "
            "the 2 workers that 4 ranks "
            "make with --ranks-per-worker 2. Start with mpirun -n 6 or more, or with "
            "--ranks-per-worker 1, or name 2",
        ),
        (
            1,
            (None, None),
            ["ga", "tpe"],
            "--propagators ga,tpe: each propagator needs its own island, and 2 is more than the 1 "
            "worker that 1 rank makes "
            "with --ranks-per-worker 1. Start with mpirun -n 2 or more, or name 1",
        ),
        (3, (2, None), [], "3 ranks cannot be divided into workers of 2. "),
        (3, (0, None), ["ga"], "--ranks-per-worker must be at least 1, got 0"),
        (3, (None, 0), ["ga"], "--islands must be at least 1, got 0"),
        (
            2,
            (None, 2),
            [],
            "--islands 2 is more than the 1 worker that 2 ranks make with --ranks-per-worker 2. ",
        ),
    ],
)
def test_choose_with_impossible_options_raises(
    ranks: int, asked: tuple[int | None, int | None], propagators: list[str], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        Layout.choose(ranks, *asked, propagators)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("ranks", "environment", "name"),
    [
        (1, {"PMI_SIZE": "2"}, "PMI_SIZE=2"),
        (1, {"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}, ""),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "5"}, ""),
        (4, {"SLURM_STEP_NUM_TASKS": "4"}, ""),
    ],
)
def test_ranks_that_cannot_communicate_are_described(
    ranks: int, environment: dict[str, str], name: str
) -> None:
    text = describe_wrong_launch(ranks, environment)
    assert bool(text) == bool(name)
    assert name in text
