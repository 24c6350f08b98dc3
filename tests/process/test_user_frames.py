"""Test how the frames of an objective are distinguished from those of this program."""

from __future__ import annotations

from pathlib import Path
from traceback import FrameSummary

import pytest

from hpo.process import user_frames
from hpo.process.user_frames import are_in_collective, select_objective_frames
from hpo.trainer import objective_runner, trainer_group
from hpo.trainer.objective_runner import ObjectiveCall, ObjectiveRunner

RUNNER = str(Path(objective_runner.__file__))
COLLECTIVE = FrameSummary("/lib/torch/distributed/distributed_c10d.py", 2000, "all_reduce")
OBJECTIVE = FrameSummary("/home/search.py", 10, "objective")


@pytest.mark.parametrize(
    "name", ["advance_to_loss", "call_gather_function", "ObjectiveCall.advance_to_loss"]
)
def test_frames_below_call_of_objective_are_selected(name: str) -> None:
    frames = [FrameSummary(RUNNER, 1, "run"), FrameSummary(RUNNER, 2, name), OBJECTIVE, COLLECTIVE]
    assert select_objective_frames(frames) == [OBJECTIVE, COLLECTIVE]


def test_trainer_that_joins_its_group_runs_no_objective() -> None:
    """Otherwise a slow connection would count as an objective that hangs in a collective."""
    joining = FrameSummary(str(Path(trainer_group.__file__)), 3, "join")
    frames = [
        FrameSummary(RUNNER, 1, "run"),
        FrameSummary(RUNNER, 2, "_enter_group"),
        joining,
        COLLECTIVE,
    ]
    assert select_objective_frames(frames) == []


def test_callers_of_the_objective_exist() -> None:
    names = {name for path, name in user_frames._CALLERS if path == RUNNER}
    assert names
    assert all(hasattr(ObjectiveCall, name) or hasattr(ObjectiveRunner, name) for name in names)


def test_stack_that_ends_in_a_collective_waits() -> None:
    wait = FrameSummary("/site-packages/torch/distributed/distributed_c10d.py", 2000, "recv")
    user = FrameSummary("/home/me/my_search.py", 7, "forward")
    assert are_in_collective([user, wait])
    assert not are_in_collective([wait, user]), "torch.distributed has called code of the user"
    assert not are_in_collective([])
