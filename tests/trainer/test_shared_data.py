"""Test prepared data: trainers share one copy, and evaluations cannot change it for others."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpo.trainer.shared_data import SharedData, pack_data


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, to which temporary files are written during the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def packed(obj: Any) -> Iterator[SharedData]:
    """Pack an object as shared data. Close its descriptor at the end of ``with``."""
    descriptor = pack_data(obj)
    try:
        yield SharedData(descriptor)
    finally:
        os.close(descriptor)


def inode_of(address: int) -> str:
    """Return the device and inode of the file at a mapped address; "00:000" without a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return device + inode
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_shared_tensors_come_back_as_they_were() -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "plain": base,
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2, 1:3],
        "one": base[:1, 2, 1],
        "none": base[:0],
        "scalar": torch.tensor(3),
        "expanded": torch.ones(3, 1).expand(3, 4),
        "half": base.bfloat16(),
        "true": base > 3,
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "imaginary": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "trained": base.clone().requires_grad_(),
    }
    with packed(tensors) as shared:
        for copy in (shared.load(), shared.load()):
            for name, tensor in tensors.items():
                assert copy[name].equal(tensor), name
                assert (copy[name].dtype, copy[name].requires_grad) == (
                    tensor.dtype,
                    tensor.requires_grad,
                ), name
            assert copy["channels last"].is_contiguous(memory_format=torch.channels_last)
            copy["plain"].zero_()
            copy["one"].zero_()


@pytest.mark.parametrize(
    "obj",
    [
        None,
        ["text", b"bytes", bytearray(b"more"), 5, 2.5, {"a": (1, 2)}],
        np.arange(100_003),
        np.zeros((0, 3)),
        np.array(5.0),
        np.array(["a", "bc"]),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array([(1, 2.5)], dtype=[("a", "u1"), ("b", "f8")]),
        [np.full(number, number, np.uint8) for number in range(130)],
        np.frombuffer(np.random.default_rng(0).bytes(8 << 10), np.float64),  # Some of them are NaN.
    ],
)
def test_shared_objects_come_back_bit_by_bit(obj: Any) -> None:
    with packed(obj) as shared:
        copy = shared.load()
        for got, expected in zip(
            *((one if isinstance(one, list) else [one]) for one in (copy, obj)), strict=True
        ):
            assert type(got) is type(expected)
            if isinstance(expected, np.ndarray):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert got.strides == expected.strides or not expected.size
                assert got.tobytes() == expected.tobytes()
                assert got.flags.writeable == expected.flags.writeable
                assert got.ctypes.data % got.dtype.alignment == 0
            else:
                assert got == expected


def test_shared_arrays_are_mapped_and_changes_stay_private() -> None:
    array, tensor = np.arange(100_003), torch.ones(1000, dtype=torch.bfloat16)
    with packed({"array": array, "tensor": tensor, "names": ["a"]}) as shared:
        first, second = shared.load(), shared.load()
        inodes = {inode_of(one["array"].ctypes.data) for one in (first, second)}
        inodes |= {inode_of(one["tensor"].data_ptr()) for one in (first, second)}
        assert len(inodes) == 1, "one copy for all"
        assert inodes != {"00:000"}, "of a file"
        first["array"][:] = 7
        first["tensor"].zero_()
        first["names"].append("b")
        for other in (second, shared.load()):
            assert (other["array"] == array).all()
            assert other["tensor"].eq(1).all()
            assert other["names"] == ["a"]
        assert (first["array"] == 7).all()


def test_shared_data_of_a_forked_process_are_the_same_file() -> None:
    with packed(np.arange(100_003)) as shared:
        array = shared.load()
        own = inode_of(array.ctypes.data)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            copy = shared.load()
            copy[:] = 1
            os.write(write, inode_of(copy.ctypes.data).encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(read, 100).decode() == own
        os.close(read)
        os.close(write)
        assert (array == np.arange(100_003)).all()
        assert (shared.load() == np.arange(100_003)).all()


def test_shared_data_without_a_descriptor_are_none() -> None:
    assert SharedData(-1).load() is None


def test_shared_data_of_past_evaluations_are_let_go() -> None:
    """Each copy has a descriptor and is part of a reference cycle, as with many objectives.

    It must be freed all the same.
    """
    gc.disable()
    try:
        with packed(np.zeros(1000)) as shared:
            before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - descriptors
            for _ in range(100):
                cycle: dict[str, Any] = {"data": shared.load()}
                cycle["self"] = cycle
            assert len(os.listdir("/dev/fd")) <= before + 20  # noqa: PTH208
    finally:
        gc.enable()


def test_pack_data_leaves_no_file_and_one_descriptor(temporary: Path) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - descriptors
    with packed([np.ones(1000), torch.ones(1000)]) as shared:
        assert list(temporary.iterdir()) == []
        assert len(os.listdir("/dev/fd")) == before + 1  # noqa: PTH208
        assert shared.load()[1].eq(1).all()


class Wrong:
    """An object that can be pickled, but not unpickled."""

    def __init__(self, needed: int) -> None:
        self.needed = needed

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrong, ()


@pytest.mark.parametrize("obj", [threading.Lock(), lambda: 0, memoryview(b""), Wrong(1)])
def test_pack_data_of_what_cannot_be_copied_raises(temporary: Path, obj: Any) -> None:
    before = len(os.listdir("/dev/fd"))  # noqa: PTH208 - descriptors
    with pytest.raises(Exception, match=r"(?i)pickle|missing 1 required"):
        pack_data([np.ones(1000), obj])
    assert list(temporary.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == before  # noqa: PTH208


def test_pack_data_on_a_full_disk_raises_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        return open("/dev/full", "w+b")  # noqa: PTH123 - pack_data closes it

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        pack_data(np.ones(1 << 20))
    assert raised.value.errno == errno.ENOSPC
