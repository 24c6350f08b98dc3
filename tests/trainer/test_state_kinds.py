"""Test types of values in checkpoints, and states of all schedulers and optimizers of torch."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpo.store.checkpoints import CheckpointInfo
from hpo.trainer.state_files import join_state, read_checkpoint_file, split_state
from tests.support.checkpoints import write_checkpoint

_STEPS = 3  # Number of steps before the state is saved, and again after it is loaded.


class Point(NamedTuple):
    x: float
    y: Any


def load_saved(saved: Any, path: Path) -> Any:
    """Write a state to a file, and return the state that is read from it."""
    write_checkpoint(path, saved, CheckpointInfo({}, [0.5], {}, 1.0))
    return read_checkpoint_file(path).load_state()


@pytest.mark.parametrize(
    "saved",
    [
        Counter({3: 1, "a": 2}),
        OrderedDict(b=1, a=2),
        defaultdict(list, {1: [2]}),
        defaultdict(Counter),
        defaultdict(None, a=1),
        Point(0.5, (1, Point(2, [None]))),
        torch.Size([2, 3]),
        {"nested": [Counter(a=1), (OrderedDict(),)]},
    ],
)
def test_checkpoint_keeps_type_of_container(saved: Any, tmp_path: Path) -> None:
    read = load_saved(saved, tmp_path / "state")
    assert read == saved
    assert repr(read) == repr(saved), "repr names the types"
    assert type(read) is type(saved)
    assert getattr(read, "default_factory", None) is getattr(saved, "default_factory", None)


def test_checkpoint_of_container_keeps_tensors(tmp_path: Path) -> None:
    read = load_saved(Point(1.0, OrderedDict(w=torch.arange(3))), tmp_path / "state")
    assert torch.equal(read.y["w"], torch.arange(3))


def test_namedtuple_without_class_keeps_fields(tmp_path: Path) -> None:
    Gone = namedtuple("Gone", "loss epoch")
    read = load_saved(Gone(0.5, 3), tmp_path / "state")
    assert (read.loss, read.epoch, read._fields) == (0.5, 3, ("loss", "epoch"))


def test_namedtuple_in_file_calls_no_other_class() -> None:
    tree = json.loads('{"namedtuple": ["subprocess", "Popen", ["args"], {"list": ["true"]}]}')
    read = join_state(tree, {})
    assert (type(read).__name__, read.args, isinstance(read, tuple)) == ("Popen", "true", True)


def test_defaultdict_with_a_function_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"got <function .*> at \['a'\]\. Save dict\(\.\.\.\) of it$"
    ):
        split_state({"a": defaultdict(lambda: 1)})


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(o, [2, 4]), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
}


def test_all_schedulers_of_torch_are_tested() -> None:
    here = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert here | {"SWALR"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Any, scheduler: Any) -> list[float]:
        found = []
        for _ in range(_STEPS):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = make()
    rates(optimizer, scheduler)
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    read = load_saved(saved, tmp_path / "state")
    assert repr(read) == repr(saved)
    expected = rates(optimizer, scheduler)
    again = make()
    again[0].load_state_dict(read["optimizer"])
    again[1].load_state_dict(read["scheduler"])
    assert rates(*again) == expected


OPTIMIZERS = [name for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_continues_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Parameter, Any]:
        weight = nn.Parameter(torch.linspace(-1.0, 2.0, 6).reshape(2, 3))
        return weight, getattr(torch.optim, name)([weight], lr=0.1)

    def train(weight: nn.Parameter, optimizer: Any) -> torch.Tensor:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            if name == "SparseAdam":
                assert weight.grad is not None
                weight.grad = weight.grad.to_sparse()
            return value

        for _ in range(_STEPS):
            optimizer.step(loss)
        return weight.detach().clone()

    weight, optimizer = make()
    saved = {"weight": train(weight, optimizer), "optimizer": optimizer.state_dict()}
    read = load_saved(saved, tmp_path / "state")
    assert repr(read) == repr(saved)
    expected = train(weight, optimizer)
    other, another = make()
    with torch.no_grad():
        other.copy_(read["weight"])
    another.load_state_dict(read["optimizer"])
    assert torch.equal(train(other, another), expected)
