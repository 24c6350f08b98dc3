"""Test which individuals a worker knows, with a writer in this process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from mpi4py import MPI

from hpo.breeding.islands import IslandWorker
from hpo.breeding.population import Individual
from hpo.breeding.propagators import RandomPropagator
from hpo.layout import Layout
from hpo.options import Options
from hpo.ranks.communicator import SleepingComm
from hpo.store.evaluations import Assignment
from tests.support.runs import SPACE, make_run
from tests.support.writer_stubs import make_client, make_writer

if TYPE_CHECKING:
    from hpo.evaluation.attempt import Attempt


def test_population_has_what_the_whole_island_has_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make_writer(make_run(tmp_path / "run"), tmp_path / "run", budget=99)
    client = make_client(writer)
    bred_from: list[list[tuple[int, float, int]]] = []

    def breed(_: RandomPropagator, population: list[Individual]) -> None:
        bred_from.append([(member.trial, member.loss, member.rank) for member in population])

    def claim(island: int, worker: int, number: int) -> Assignment:
        params = {"layers": 1, "activation": "tanh", "lr": 0.1, "gamma": 0.5 + number / 100}
        claimed = client.claim(params, island=island, worker=worker, generation=0)
        assert claimed is not None
        return claimed

    def complete(assignment: Assignment) -> None:
        client.notify.complete(assignment, assignment.number / 10, 1.0, {})

    def evaluate(assignment: Assignment) -> Attempt:
        """End an evaluation of this worker, and of each other one, which then claim the next."""
        complete(assignment)
        for worker, begun in others.items():
            complete(begun)
            others[worker] = claim(int(worker == 2), worker, 10 * worker + len(bred_from))
        return cast("Attempt", SimpleNamespace(is_stopped=len(bred_from) == 3))

    monkeypatch.setattr(RandomPropagator, "breed", breed)
    for island in (3, 4):  # Trials 0 and 1, of a session with more islands.
        complete(claim(island, 5, island))
    others = {worker: claim(int(worker == 2), worker, 10 * worker) for worker in (1, 2)}
    options = Options(
        Path("search.py"), evaluations=99, propagators=("random",), migration_probability=0
    )
    layout = Layout(3, 1, 2)  # Workers 0 and 1 are on island 0, and worker 2 on island 1.
    comm = SleepingComm(MPI.COMM_SELF)
    IslandWorker(comm, client, SPACE, layout, options).run(evaluate)
    generations = {
        evaluation.trial: evaluation.generation
        for evaluation in writer.read_evaluations()
        if evaluation.worker == 0
    }
    restored = [(1, 0.1, 1)]
    first = [(2, 0.2, 1), (4, 0.4, 0)]
    second = [(5, 0.5, 1), (7, 0.7, 0)]
    assert [sorted(known) for known in bred_from] == [
        restored,
        restored + first,
        restored + first + second,
    ]
    assert generations == {4: 0, 7: 1, 10: 2}
