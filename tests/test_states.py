"""What objectives save: taken apart, written, read again, and refused where it is not what was written."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpo.evaluation.state import Parts, copied, is_function, parts_of, put_together
from hpo.evaluation.verdict import Step, judge
from hpo.store.states import About, State, States, read_state
from hpo.store.trials import Assignment

PARAMS = {"lr": 0.1, "layers": 2, "activation": "relu"}


def assignment(number: int, root: int | None = None) -> Assignment:
    return Assignment(number, number, PARAMS, number if root is None else root)


def state_of(saved: Any, weights: dict[str, torch.Tensor] | None = None) -> State:
    parts = copied(parts_of(saved))
    return State(About(PARAMS, [0.5, 0.25], {"accuracy": 0.5}, 12.5, parts.tree), parts.leaves, weights)


def through(states: States, saved: Any) -> Any:
    """Write what was saved, and return what is read."""
    states.write(assignment(0), state_of(saved))
    state = read_state(states.path(0), PARAMS)
    return put_together(state.about.tree, state.tensors)


def trained() -> dict[str, Any]:
    """Return the state of a training in which everything has been used."""
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        for schedule in schedules[:2]:
            schedule.step()
        schedules[2].step(0.5)  # type: ignore[arg-type]
    return {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedules": [schedule.state_dict() for schedule in schedules],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "random": (torch.get_rng_state(), np.random.get_state(), np.random.default_rng(1).bit_generator.state),
    }


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(other, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            assert_equal(one[key], other[key])
    elif isinstance(other, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert (type(one), one) == (type(other), other)


def test_states_of_torch_come_back_as_they_were(tmp_path: Path) -> None:
    saved = trained()
    read = through(States(tmp_path / "states"), saved)
    assert_equal(read, {**saved, "network": dict(saved["network"])})
    torch.set_rng_state(read["random"][0])
    np.random.set_state(read["random"][1])


@pytest.mark.parametrize(
    "saved",
    [
        {},
        [],
        None,
        (1, (2.5, float("inf")), [True, None, "text"], -(2**80)),
        {1: {"a": ()}, "1": [{}], "nested": {"deep": {2: "b"}}, "\udcff\0": "\U0001f4a9"},
        torch.tensor(3.0),
        [torch.zeros(0, 3), torch.zeros(()), torch.ones(2, 3).T, torch.arange(6)[::2], torch.zeros(1).expand(4)],
        [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64)],
        [torch.tensor([1 + 2j]), nn.Parameter(torch.ones(2)).data],
        [np.arange(3, dtype=np.uint32), np.array(["text"]), np.zeros((0, 2)), np.array(5.0)],
    ],
)
def test_whatever_is_plain_comes_back_as_it_was(tmp_path: Path, saved: Any) -> None:
    assert_equal(through(States(tmp_path / "states"), saved), saved)


def test_numbers_of_numpy_and_ordered_dicts_become_plain(tmp_path: Path) -> None:
    read = through(
        States(tmp_path / "states"), OrderedDict(a=np.float64(0.5), b=np.int32(3), c=nn.Parameter(torch.ones(1)))
    )
    assert_equal(read, {"a": 0.5, "b": 3, "c": torch.ones(1)})
    assert not read["c"].requires_grad


def test_a_copy_is_a_copy_and_a_tensor_in_two_places_is_one() -> None:
    tensor, history = torch.zeros(3), [0.5]
    state = {"epoch": 1, "history": history}
    parts = parts_of({"a": tensor, "b": [tensor], "state": state})
    history.append(0.25)
    state.clear()
    kept = copied(parts)
    tensor += 1
    assert len(kept.leaves) == 1
    expected = {"a": torch.zeros(3), "b": [torch.zeros(3)], "state": {"epoch": 1, "history": [0.5]}}
    assert_equal(put_together(kept.tree, kept.leaves), expected)
    assert copied(parts, is_kept=False) == Parts(parts.tree, {})


def itself() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (nn.Linear(1, 1), r"not the Linear itself: save its state_dict\(\)$"),
        ({"a": [0, {"b": torch.Generator()}]}, r"not a Generator at \['a'\]\[1\]\['b'\]$"),
        ({"a": {1, 2}}, r"not a set at \['a'\]$"),
        ({"a": b"bytes"}, r"not a bytes at \['a'\]$"),
        ({("a", 1): 2}, r"names or integers as keys, not \('a', 1\), at its top$"),
        ({"a": {2.5: 2}}, r"names or integers as keys, not 2\.5, at \['a'\]$"),
        ([torch.eye(3).to_sparse()], r"not a Tensor that is sparse at \[0\]$"),
        ([torch.empty(3, device="meta")], r"not a Tensor that is on no device at \[0\]$"),
        ({"a": np.array([object()])}, r"not a ndarray at \['a'\]$"),
        (itself(), r"no state that contains itself: \[0\]\[0\]"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(saved: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        parts_of(saved)


def test_functions_are_told_from_states() -> None:
    assert is_function(dict)
    assert is_function(trained)
    assert not any(map(is_function, ({}, OrderedDict(), [], nn.Linear(1, 1), None)))


def test_ranks_that_do_not_save_alike_are_named() -> None:
    steps = [Step(0, 0.5, saves=True, place="mine.py:3"), Step(1, 0.5, place="mine.py:5")]
    verdict = judge(steps)
    assert verdict.state == "failed"
    assert verdict.failure == (
        "not all ranks saved a function, or sharded tensors, which all of them have to gather: "
        "rank 0 did at mine.py:3, rank 1 did not at mine.py:5"
    )


def test_what_is_known_of_an_evaluation_is_kept_with_its_state(tmp_path: Path) -> None:
    states = States(tmp_path / "states")
    states.write(assignment(5, root=2), state_of({"epoch": 2}, {"bias": torch.ones(2)}))
    state = read_state(states.path(2), PARAMS)
    assert vars(state.about) == {
        "params": PARAMS,
        "losses": [0.5, 0.25],
        "metrics": {"accuracy": 0.5},
        "seconds": 12.5,
        "tree": {"dict": [["epoch", 2]]},
    }
    assert state.weights is not None
    assert torch.equal(state.weights["bias"], torch.ones(2))
    assert not state.tensors
    with pytest.raises(ValueError, match="is of other hyperparameters"):
        read_state(states.path(2), {**PARAMS, "lr": 0.2})


def changed(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("damage", [lambda c, at: c[:at], changed, lambda c, at: c[:at] + b"\0" + c[at:]])
def test_no_damage_goes_unnoticed(tmp_path: Path, damage: Callable[[bytes, int], bytes]) -> None:
    states, path = States(tmp_path), tmp_path / "0.safetensors"
    states.write(assignment(0), state_of({"a": torch.arange(4), "b": [1, "x"]}, {"w": torch.ones(2)}))
    content = path.read_bytes()
    whole = read_state(path, PARAMS)
    for place in range(len(content)):
        path.write_bytes(damage(content, place))
        try:
            state = read_state(path, PARAMS)
        except ValueError:
            continue
        # Spaces that fill up the header, and the like.
        assert state.about == whole.about
        assert_equal(dict(state.tensors), dict(whole.tensors))


@pytest.mark.parametrize(
    "about",
    [
        [],
        {},
        {"params": PARAMS, "losses": 3, "metrics": {}, "seconds": 1.0},
        {"params": PARAMS, "losses": ["x"], "metrics": {}, "seconds": 1.0},
        {"params": PARAMS, "losses": [1.0], "metrics": {"a": "b"}, "seconds": 1.0},
        {"params": PARAMS, "losses": [1.0], "metrics": {}, "seconds": None},
        {"params": [], "losses": [1.0], "metrics": {}, "seconds": 1.0},
        {"params": PARAMS, "losses": [1.0], "metrics": {}, "seconds": 1.0, "more": 1},
    ],
)
def test_what_no_evaluation_has_written_is_refused(tmp_path: Path, about: Any) -> None:
    from safetensors.torch import save_file

    save_file({}, tmp_path / "0.safetensors", {"about": json.dumps(about), "checksum": "0"})
    with pytest.raises(ValueError, match=r"0\.safetensors cannot be read: "):
        read_state(tmp_path / "0.safetensors", PARAMS, is_checked=False)


def test_the_state_before_stays_where_the_disk_is_full_or_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = States(tmp_path)
    states.write(assignment(0), state_of({"a": torch.zeros(3)}))
    before = (tmp_path / "0.safetensors").read_bytes()
    with pytest.raises(TypeError):
        states.write(assignment(0), State(About(PARAMS, [], {}, 0.0, object()), {}))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60e6))
    with pytest.raises(OSError, match="it takes 0 MB, and 60 MB are free"):
        states.write(assignment(0), state_of({"a": torch.ones(3)}))
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]
    assert (tmp_path / "0.safetensors").read_bytes() == before


def test_states_of_what_has_ended_are_removed_and_no_others(tmp_path: Path) -> None:
    states, confirming = States(tmp_path / "states"), States(tmp_path / "states", "confirm-")
    for number in (0, 1, 12):
        states.write(assignment(number), state_of({}))
        confirming.write(assignment(number), state_of({}))
    (tmp_path / "states" / ".3.safetensors").write_bytes(b"draft")
    (tmp_path / "states" / "mine.txt").write_bytes(b"mine")
    states.sweep({1})
    confirming.sweep({12})
    confirming.discard(assignment(40, root=12))
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["1.safetensors", "mine.txt"]
    states.leave()
    assert (tmp_path / "states").exists()


def test_a_small_disk_is_said_before_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = States(tmp_path / "states")

    def shortage(free: float) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        return states.shortage(most=20)

    assert shortage(2e9) == ""
    some = "are free for what evaluations go on from (--save-every):"
    assert shortage(0.5e9) == f"0.5 GB {some} that may be too little"
    monkeypatch.undo()
    states.write(assignment(0), state_of({"a": torch.zeros(10_000_000)}))
    assert shortage(0.9e9) == ""
    assert shortage(0.5e9) == f"0.5 GB {some} at least 0.8 GB are needed"
