"""Test which trainers the ranks of a worker use, with trainers that end at a given moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.evaluation import trainer_client
from hpo.evaluation.host import Gpus, RankPlace
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_client import TrainerOptions, TrainerOutput, TrainerSlot


def ignore() -> None:
    pass


class OneRank:
    """A communicator of one rank, which calls `on_agreement` when the ranks have agreed."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.on_agreement: Callable[[], object] = ignore

    def allgather(self, value: Any) -> list[Any]:
        self.on_agreement()
        return [value]

    def bcast(self, value: Any) -> Any:
        return value


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> TrainerSlot:
    """Return a slot whose trainers are numbers. `slot._template.ended` has the ended ones."""
    numbers = itertools.count()

    def make_trainer(*_: object) -> Any:
        return SimpleNamespace(
            process=next(numbers), kill=ignore, close=ignore, wait_for_exit=ignore
        )

    monkeypatch.setattr(trainer_client, "TrainerClient", make_trainer)
    ended: set[int] = set()
    template: Any = SimpleNamespace(
        read_messages=ignore, has_ended=lambda process: process in ended, ended=ended
    )
    return TrainerSlot(template, TrainerOutput(), TrainerOptions(1, "WARNING"))


def test_trainer_that_ends_after_the_agreement_is_not_replaced(slot: TrainerSlot) -> None:
    comm: Any = OneRank()
    ended: set[int] = slot._template.ended  # type: ignore[attr-defined]
    with RankGroup(comm, RankPlace(0, "here", Gpus()), 0, 60.0, slot) as group:
        group.fork_ahead()
        ticket, _ = group.connect()
        assert (ticket is not None, group.trainer.process) == (True, 0)
        assert (group.connect()[0], group.trainer.process) == (None, 0)
        comm.on_agreement = lambda: ended.add(0)
        ticket, _ = group.connect()
        assert (ticket, group.trainer.process) == (None, 0), "another one is not in the group"
        ticket, _ = group.connect()
        assert (ticket is not None, group.trainer.process) == (True, 1)
