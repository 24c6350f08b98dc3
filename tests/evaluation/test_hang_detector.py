"""Test how an objective that blocks in a collective is detected."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import FrameSummary
from typing import Any

import pytest

from hpo.evaluation.supervision import HangDetector
from hpo.process import clock

COLLECTIVE = FrameSummary("/lib/torch/distributed/distributed_c10d.py", 2000, "all_reduce")
FORWARD = FrameSummary("/lib/torch/nn/parallel/distributed.py", 1600, "_pre_forward")
BACKWARD = FrameSummary("/lib/torch/autograd/graph.py", 900, "_engine_run_backward")
OBJECTIVE = FrameSummary("search.py", 10, "objective")


class TrainerStub:
    """A trainer with a given state, CPU time and stack, which counts the requests for its stack."""

    def __init__(self) -> None:
        self.is_asleep, self.ticks = True, 100
        self.stack: Sequence[FrameSummary] = [OBJECTIVE, COLLECTIVE]
        self.requests = 0

    def read_thread_state(self) -> tuple[bool, int]:
        return self.is_asleep, self.ticks

    def find_stack(self) -> Sequence[FrameSummary]:
        self.requests += 1
        return self.stack


@pytest.fixture
def trainer() -> Any:
    return TrainerStub()


@pytest.mark.parametrize("last", [COLLECTIVE, FORWARD, BACKWARD])
def test_wait_for_ranks_hangs_after_the_patience(trainer: Any, last: FrameSummary) -> None:
    trainer.stack = [OBJECTIVE, last]
    detector, began = HangDetector(trainer, 8.0), clock.now()
    assert [detector.is_hanging(began + seconds) for seconds in (1, 3, 5, 7, 9, 11)] == [
        *5 * [False],
        True,
    ]
    assert list(detector.frames) == [OBJECTIVE, last]


def test_time_before_the_collective_does_not_count(trainer: Any) -> None:
    detector, began = HangDetector(trainer, 8.0), clock.now()
    trainer.stack = [OBJECTIVE]
    assert not detector.is_hanging(began + 3)
    trainer.stack = [OBJECTIVE, COLLECTIVE]
    assert [detector.is_hanging(began + seconds) for seconds in (6, 9, 12, 13.9, 14.1)] == [
        *4 * [False],
        True,
    ]


def test_busy_objective_is_not_asked_for_its_stack(trainer: Any) -> None:
    """A process that runs Python code may crash while it writes its stack."""
    detector, began = HangDetector(trainer, 8.0), clock.now()
    for seconds in range(3, 60, 3):
        trainer.ticks += 50
        assert not detector.is_hanging(began + seconds)
    assert trainer.requests == 0


def test_objective_waiting_for_a_core_is_not_asked(trainer: Any) -> None:
    trainer.is_asleep = False
    detector, began = HangDetector(trainer, 8.0), clock.now()
    assert not any(detector.is_hanging(began + seconds) for seconds in range(3, 60, 3))
    assert trainer.requests == 0


@pytest.mark.parametrize("stack", [[], [OBJECTIVE], [COLLECTIVE, OBJECTIVE]])
def test_idle_objective_outside_of_collectives_does_not_hang(
    trainer: Any, stack: list[FrameSummary]
) -> None:
    trainer.stack = stack
    detector, began = HangDetector(trainer, 8.0), clock.now()
    assert not any(detector.is_hanging(began + seconds) for seconds in range(3, 60, 3))
    assert trainer.requests > 0


def test_objective_at_changing_lines_does_not_hang(trainer: Any) -> None:
    detector, began = HangDetector(trainer, 8.0), clock.now()
    for seconds in range(3, 60, 3):
        trainer.stack = [FrameSummary("search.py", seconds, "objective"), COLLECTIVE]
        assert not detector.is_hanging(began + seconds)
