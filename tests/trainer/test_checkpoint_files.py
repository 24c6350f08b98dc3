"""Test checkpoints: they are split, written and read, and refused if they are damaged."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpo.evaluation.draft_store import DraftStore
from hpo.process.messages import ReportAnswer
from hpo.store.checkpoints import CheckpointInfo, CheckpointStore, read_checkpoint_info
from hpo.store.evaluations import Assignment
from hpo.trainer.offers import Offers
from hpo.trainer.state_files import (
    Checkpoint,
    StateParts,
    gather_parts,
    is_state_function,
    read_checkpoint_file,
    split_state,
    write_tensors,
)
from tests.support.checkpoints import copy_offers, read_checkpoint_weights, write_checkpoint
from tests.support.launch import ROOT
from tests.support.limits import scale

PARAMS = {"lr": 0.1, "layers": 2, "activation": "relu"}


def make_assignment(number: int, root: int | None = None) -> Assignment:
    return Assignment(number, number, PARAMS, number if root is None else root)


def write(
    store: CheckpointStore,
    assignment: Assignment,
    saved: Any,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a checkpoint: the trainer copies the state, and the leader writes the file."""
    info = CheckpointInfo(PARAMS, [0.5, 0.25], {"accuracy": 0.5}, 12.5)
    with store.replace_checkpoint(assignment.root) as draft:
        write_checkpoint(draft, saved, info, weights)


def save_and_load(store: CheckpointStore, saved: Any) -> Any:
    """Write a state as a checkpoint, and return the state that is read from it."""
    write(store, make_assignment(0), saved)
    read_checkpoint_info(store.get_path(0), PARAMS)
    return read_checkpoint_file(store.get_path(0)).load_state()


def make_trained_state() -> dict[str, Any]:
    """Return the state of a training that contains all kinds of objects."""
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
        "random": (
            torch.get_rng_state(),
            np.random.get_state(),
            np.random.default_rng(1).bit_generator.state,
        ),
    }


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected, strict=True)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_equal(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_equal(mine, theirs)
    else:
        assert (type(actual), actual) == (type(expected), expected)


def test_checkpoint_of_torch_state_is_read_unchanged(tmp_path: Path) -> None:
    saved = make_trained_state()
    read = save_and_load(CheckpointStore(tmp_path / "checkpoints"), saved)
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
        [
            torch.zeros(0, 3),
            torch.zeros(()),
            torch.ones(2, 3).T,
            torch.arange(6)[::2],
            torch.zeros(1).expand(4),
        ],
        [
            torch.ones(2, dtype=kind)
            for kind in (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64)
        ],
        [torch.tensor([1 + 2j]), nn.Parameter(torch.ones(2)).data],
        [np.arange(3, dtype=np.uint32), np.array(["text"]), np.zeros((0, 2)), np.array(5.0)],
        [
            torch.arange(6).reshape(2, 3).to(getattr(torch, name)).t()
            for name in ("float64", "uint32", "int8", "bool")
        ],
        [
            torch.arange(6).to(torch.complex64).reshape(2, 3).conj(),
            torch.ones(2, dtype=torch.complex128).imag,
        ],
    ],
)
def test_checkpoint_of_plain_values_is_read_unchanged(tmp_path: Path, saved: Any) -> None:
    assert_equal(save_and_load(CheckpointStore(tmp_path / "checkpoints"), saved), saved)


@pytest.mark.parametrize(
    "name", ["float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2", "uint16", "uint64", "float16"]
)
def test_checkpoint_of_rare_dtypes_keeps_all_bits(tmp_path: Path, name: str) -> None:
    saved = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    read = save_and_load(CheckpointStore(tmp_path / "checkpoints"), saved)
    assert read.dtype == saved.dtype
    assert torch.equal(read.view(torch.uint8), saved.view(torch.uint8))


@pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no dtype of 4 bits"
)
def test_checkpoint_of_4_bit_values_keeps_shape_and_bits(tmp_path: Path) -> None:
    saved = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    read = save_and_load(CheckpointStore(tmp_path / "checkpoints"), saved)
    assert (read.dtype, read.shape) == (saved.dtype, saved.shape)
    assert torch.equal(read.view(torch.uint8), saved.view(torch.uint8))


class WrappedTensor(torch.Tensor):
    """A tensor whose data are elsewhere, as those of quantized tensors are."""

    def __new__(cls) -> WrappedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_write_of_tensor_without_memory_fails(tmp_path: Path) -> None:
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)  # FSDP frees tensors in this way.
    with pytest.raises(ValueError, match="without memory on the CPU cannot be saved"):
        write_tensors(tmp_path / "weights", {"a": freed}, {})
    with pytest.raises(
        ValueError, match="a WrappedTensor without memory on the CPU cannot be saved"
    ):
        write_tensors(tmp_path / "weights", {"a": WrappedTensor()}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["\udcff", "__metadata__"], ids=["surrogate", "metadata"])
def test_write_of_name_that_cannot_be_read_fails(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"surrogates not allowed|cannot have the name __metadata__"
    ):
        write_tensors(tmp_path / "weights", {name: torch.ones(2)}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.eye(2).to_sparse(),
            r"a sparse tensor cannot be saved: convert it with to_dense\(\)",
        ),
        (torch.ones(2, dtype=torch.complex128), "a tensor of torch.complex128 cannot be saved"),
        (torch.empty(2, device="meta"), "a Tensor without memory on the CPU cannot be saved"),
    ],
)
def test_write_of_unsupported_tensor_names_its_kind(
    tmp_path: Path, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        write_tensors(tmp_path / "weights", {"a": tensor}, {})
    assert not list(tmp_path.iterdir())


def test_checkpoint_converts_numpy_and_parameters(tmp_path: Path) -> None:
    read = save_and_load(
        CheckpointStore(tmp_path / "checkpoints"),
        {"a": np.float64(0.5), "b": np.int32(3), "c": nn.Parameter(torch.ones(1))},
    )
    assert_equal(read, {"a": 0.5, "b": 3, "c": torch.ones(1)})
    assert not read["c"].requires_grad


def test_copied_state_is_independent_and_keeps_shared_tensors(tmp_path: Path) -> None:
    tensor, history = torch.zeros(3), [0.5]
    state = {"epoch": 1, "history": history}
    offers = Offers(True, None, None)
    offers.save_checkpoint({"a": tensor, "b": [tensor], "state": state})
    history.append(0.25)
    state.clear()
    drafts = DraftStore(tmp_path / ".0", PARAMS)
    copy = copy_offers(offers, keeps_weights=False, saves_checkpoint=True)["checkpoint"]
    drafts.keep_checkpoint(copy, {"losses": [], "metrics": {}, "seconds": 0.0})
    tensor += 1
    drafts.make_checkpoint_file(tmp_path / "0.safetensors")
    drafts.close()
    kept = read_checkpoint_file(tmp_path / "0.safetensors")
    assert len(kept.tensors) == 1
    expected = {"a": torch.zeros(3), "b": [torch.zeros(3)], "state": {"epoch": 1, "history": [0.5]}}
    assert_equal(kept.load_state(), expected)


def test_gather_parts_on_other_ranks_keeps_no_tensors() -> None:
    parts = split_state({"a": torch.zeros(3)})
    assert gather_parts(parts, is_kept=False) == StateParts(parts.tree, {})


def make_cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (nn.Linear(1, 1), r"got the Linear itself: save its state_dict\(\)$"),
        ({"a": [0, {"b": torch.Generator()}]}, r"got a Generator at \['a'\]\[1\]\['b'\]$"),
        ({"a": {1, 2}}, r"got a set at \['a'\]$"),
        ({"a": b"bytes"}, r"got a bytes at \['a'\]$"),
        ({("a", 1): 2}, r"texts or integers as keys, got \('a', 1\) at its top$"),
        ({"a": {2.5: 2}}, r"texts or integers as keys, got 2\.5 at \['a'\]$"),
        ([torch.eye(3).to_sparse()], r"got a Tensor that is sparse at \[0\]$"),
        ([torch.empty(3, device="meta")], r"got a Tensor that is on no device at \[0\]$"),
        ({"a": np.array([object()])}, r"got a ndarray at \['a'\]$"),
        (make_cycle(), r"must not contain itself: \[0\]\[0\]"),
    ],
)
def test_save_of_unsupported_value_names_its_path(saved: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        split_state(saved)


def test_is_state_function_accepts_functions_only() -> None:
    assert is_state_function(dict)
    assert is_state_function(make_trained_state)
    assert not any(map(is_state_function, ({}, OrderedDict(), [], nn.Linear(1, 1), None)))


def test_checkpoint_keeps_description_of_evaluation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    write(store, make_assignment(5, root=2), {"epoch": 2}, {"bias": torch.ones(2)})
    state = read_checkpoint_file(store.get_path(2))
    assert (
        read_checkpoint_info(store.get_path(2), PARAMS)
        == read_checkpoint_info(store.get_path(2), is_checked=False)
        == state.metadata
    )
    assert vars(state.metadata) == {
        "params": PARAMS,
        "losses": [0.5, 0.25],
        "metrics": {"accuracy": 0.5},
        "seconds": 12.5,
        "tree": {"dict": [["epoch", 2]]},
        "has_weights": True,
    }
    assert torch.equal(read_checkpoint_weights(store.get_path(2))["bias"], torch.ones(2))
    assert not state.tensors
    with pytest.raises(ValueError, match="belongs to other hyperparameters"):
        read_checkpoint_info(store.get_path(2), {**PARAMS, "lr": 0.2})
    with pytest.raises(ValueError, match="belongs to other hyperparameters"):
        read_checkpoint_info(store.get_path(2), {**PARAMS, "lr": 0.2}, is_checked=False)


class Executed:
    """An object that runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


def flip_bit(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda c, at: c[:at], flip_bit, lambda c, at: c[:at] + b"\0" + c[at:]]
)
def test_checkpoint_with_any_damage_is_refused(
    tmp_path: Path, damage: Callable[[bytes, int], bytes]
) -> None:
    path = tmp_path / "0.safetensors"
    write(
        CheckpointStore(tmp_path),
        make_assignment(0),
        {"a": torch.arange(4), "b": [1, "x"]},
        {"w": torch.ones(2)},
    )
    content = path.read_bytes()
    whole, weights = read_checkpoint_file(path), read_checkpoint_weights(path)
    unnoticed = 0
    for position in range(len(content)):
        path.write_bytes(damage(content, position))
        try:
            info = read_checkpoint_info(path, PARAMS)
        except ValueError:
            continue
        # Only bytes without meaning may change unnoticed, such as spaces that pad the header.
        assert info == whole.metadata
        try:
            state = read_checkpoint_file(path)  # An error here fails the evaluation in the trainer.
        except ValueError:
            continue
        unnoticed += 1
        assert_equal(dict(state.tensors), dict(whole.tensors))
        assert_equal(read_checkpoint_weights(path), weights)
    assert unnoticed < 20


def test_read_info_of_cut_file_without_check_fails(tmp_path: Path) -> None:
    path = tmp_path / "0.safetensors"
    write(
        CheckpointStore(tmp_path), make_assignment(0), {"a": torch.arange(4)}, {"w": torch.ones(2)}
    )
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position])
        with pytest.raises(ValueError, match=r"0\.safetensors cannot be read: "):
            read_checkpoint_info(path, PARAMS, is_checked=False)


@pytest.mark.parametrize(
    "number", ["9" * 23, "9223372036854775807", "1e308", "-5", "1.5", "NaN", "null", "[]", '""']
)
def test_read_info_with_any_wrong_number_fails(tmp_path: Path, number: str) -> None:
    path = tmp_path / "0.safetensors"
    write(
        CheckpointStore(tmp_path), make_assignment(0), {"a": torch.arange(4)}, {"w": torch.ones(2)}
    )
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for match in re.finditer(rb"(?<=[\[,])\d+(?=[\],])", content[:end]):
        header = content[8 : match.start()] + number.encode() + content[match.end() : end]
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
        with suppress(ValueError):  # Only trainers read shapes.
            read_checkpoint_info(path, PARAMS, is_checked=False)
        with suppress(ValueError):
            assert read_checkpoint_info(path, PARAMS).params == PARAMS


def test_checkpoint_with_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    """Both readers refuse a pickle instead of a checkpoint, and do not run it."""
    path = tmp_path / "0.safetensors"
    code = f"open({str(tmp_path / 'was run')!r}, 'w')"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Executed(code), protocol))
        with pytest.raises(ValueError, match="cannot be read: "):
            read_checkpoint_info(path)
        with pytest.raises(ValueError, match="cannot be read: "):
            read_checkpoint_file(path)
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="cannot be read: "):
        read_checkpoint_info(path)
    assert [file.name for file in tmp_path.iterdir()] == ["0.safetensors"]


@pytest.mark.parametrize(
    "info",
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
def test_checkpoint_with_invalid_info_is_refused(tmp_path: Path, info: Any) -> None:
    from safetensors.torch import save_file

    save_file({}, tmp_path / "0.safetensors", {"about": json.dumps(info), "checksum": "0"})
    with pytest.raises(ValueError, match=r"0\.safetensors cannot be read: "):
        read_checkpoint_info(tmp_path / "0.safetensors", PARAMS, is_checked=False)
    with pytest.raises(ValueError, match=r"0\.safetensors cannot be read: "):
        read_checkpoint_file(tmp_path / "0.safetensors")


def test_failed_write_keeps_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, make_assignment(0), {"a": torch.zeros(3)})
    before = (tmp_path / "0.safetensors").read_bytes()
    with pytest.raises(TypeError):
        write(store, make_assignment(0), object())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60e6))
    with pytest.raises(
        OSError, match="it needs 0 MB, but 60 MB are free and 67 MB must stay free for the record"
    ):
        write(store, make_assignment(0), {"a": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]
    assert (tmp_path / "0.safetensors").read_bytes() == before


def test_killed_write_leaves_only_its_draft(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    draft = tmp_path / "checkpoints" / ".0.safetensors"
    draft.parent.mkdir()
    code = (
        "import resource, signal, sys, torch; from pathlib import Path;"
        "from hpo.trainer.state_files import write_tensors;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "write_tensors(Path(sys.argv[1]), {'a': torch.zeros(1000)}, {})"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, draft], cwd=ROOT, timeout=scale(60), check=False
    )
    assert killed.returncode == -signal.SIGXFSZ
    assert list(draft.parent.iterdir()) == [draft]
    store.remove_all_except([])
    store.remove_empty_folder()
    assert not draft.parent.exists()


def test_checkpoint_store_removes_only_ended_evaluations(tmp_path: Path) -> None:
    store, confirming = (
        CheckpointStore(tmp_path / "checkpoints"),
        CheckpointStore(tmp_path / "checkpoints", "confirm-"),
    )
    for number in (0, 1, 12):
        write(store, make_assignment(number), {})
        write(confirming, make_assignment(number), {})
    (tmp_path / "checkpoints" / ".3.safetensors").write_bytes(b"draft")
    (tmp_path / "checkpoints" / "mine.txt").write_bytes(b"mine")
    store.remove_all_except({1})
    confirming.remove_all_except({12})
    confirming.remove_checkpoint(12)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "1.safetensors",
        "mine.txt",
    ]
    store.remove_empty_folder()
    assert (tmp_path / "checkpoints").exists()


def test_describe_shortage_with_small_disk_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")

    def shortage(free: float) -> str:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        return store.describe_shortage(most=20)

    assert shortage(2e9) == ""
    some = "are free for checkpoints (--checkpoint-every):"
    assert shortage(0.5e9) == f"0.5 GB {some} that may be too little"
    monkeypatch.undo()
    write(store, make_assignment(0), {"a": torch.zeros(10_000_000)})
    assert shortage(0.9e9) == ""
    assert shortage(0.5e9) == f"0.5 GB {some} at least 0.8 GB are needed"


def test_offers_copy_state_of_last_loss(tmp_path: Path) -> None:
    offers, tensor, drafts = (
        Offers(True, None, None),
        torch.zeros(3),
        DraftStore(tmp_path / ".0", PARAMS),
    )
    for step in (1.0, 2.0):
        offers.offer_weights({"w": tensor})
        offers.save_checkpoint({"a": tensor})
        copies = copy_offers(offers, keeps_weights=True, saves_checkpoint=True)
        drafts.keep_weights(copies["weights"])
        info = {"losses": [step], "metrics": {}, "seconds": 1.5}
        drafts.keep_checkpoint(copies["checkpoint"], info)
        tensor += step
    assert drafts.make_checkpoint_file(tmp_path / "draft") == 1
    drafts.close()
    state = read_checkpoint_file(tmp_path / "draft")
    assert state.metadata == CheckpointInfo(
        PARAMS, [2.0], {}, 1.5, {"dict": [["a", {"tensor": "0"}]]}, has_weights=True
    )
    assert_equal(dict(state.tensors), {"0": torch.ones(3)})
    assert_equal(read_checkpoint_weights(tmp_path / "draft"), {"w": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["draft"], "copies have no names on disk"


def test_offers_without_request_copy_nothing() -> None:
    offers = Offers(True, None, None)
    offers.offer_weights({"w": torch.zeros(3)})
    offers.save_checkpoint({"a": torch.zeros(3)})
    assert copy_offers(offers, keeps_weights=False, saves_checkpoint=False) == {}


def test_failed_copy_reports_error_and_leaves_no_file() -> None:
    offers = Offers(True, None, None)
    offers.offer_weights({"w": torch.ones(1, dtype=torch.complex128)})
    offers.save_checkpoint({"a": torch.zeros(3)})
    before = len(list(Path("/proc/self/fd").iterdir()))
    copies = offers.copy(ReportAnswer(continues=True, keeps_weights=True, saves_checkpoint=True))
    assert (copies.kinds, list(copies.errors)) == (["checkpoint"], ["weights"])
    assert "torch.complex128 cannot be saved" in copies.errors["weights"]
    copies.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_checkpoint_can_be_read_until_next_loss() -> None:
    state = Checkpoint(CheckpointInfo(PARAMS, [0.5, 0.25], {}, 12.5, {"dict": [["epoch", 2]]}), {})
    offers = Offers(True, state, None)
    assert offers.reads["has_resumed"] is False
    assert offers.load_checkpoint() == {"epoch": 2}
    assert offers.has_loss, "the losses before the checkpoint count"
    assert offers.load_checkpoint() == {"epoch": 2}
    assert offers.reads["has_resumed"] is True
    copy_offers(offers, keeps_weights=False, saves_checkpoint=False)
    with pytest.raises(
        RuntimeError, match=r"worker\.checkpoint must be read before the first loss"
    ):
        offers.load_checkpoint()
    with pytest.raises(
        RuntimeError, match=r"worker\.parent_checkpoint must be read before the first loss"
    ):
        offers.load_parent_checkpoint()
    offers = Offers(True, state, None)
    offers.has_loss = True
    with pytest.raises(
        RuntimeError, match=r"worker\.checkpoint must be read before the first loss"
    ):
        offers.load_checkpoint()
