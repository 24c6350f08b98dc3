"""Write tensors to safetensors files."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hpo.store.tensors import TensorBytes, read_header, write_file


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write CPU tensors and texts to a file, without flushing it to disk.

    safetensors 0.8 would write to a file with a random name first. If the process is killed, this file would stay.
    """
    write_file(path, {name: _view_tensor(tensor) for name, tensor in tensors.items()}, texts, is_flushed=False)


def _view_tensor(tensor: Tensor) -> TensorBytes:
    """Return the bytes of a contiguous CPU tensor, without a copy. Raises an error if it cannot be in a file."""
    if tensor.layout != torch.strided:
        raise ValueError("a sparse tensor cannot be saved: convert it with to_dense()")
    dtype, factor = _describe_dtype(tensor.dtype)
    shape = list(tensor.shape)
    if shape:
        shape[-1] *= factor
    memory = _view_bytes(tensor)
    return TensorBytes(dtype, shape, tensor.nbytes, lambda: memory)


@cache
def _describe_dtype(dtype: torch.dtype) -> tuple[str, int]:
    """Return the name of a dtype in safetensors files, and the number of values in an element: 2 for 4-bit values.

    Raises ValueError if such files cannot have the dtype.
    """
    try:
        header, _ = read_header(BytesIO(save({"one": torch.empty(1, dtype=dtype, device="cpu")})))
    except KeyError as error:
        raise ValueError(f"a tensor of {dtype} cannot be saved") from error
    return header["one"]["dtype"], header["one"]["shape"][0]


def _view_bytes(tensor: Tensor) -> list[Any]:
    """Return the memory of a contiguous CPU tensor as a list of at most one bytes-like object, without a copy.

    Raises ValueError or RuntimeError if the tensor has no such memory, as tensors of some subclasses have none.
    """
    address = tensor.data_ptr()
    if tensor.nbytes and (not address or tensor.device.type != "cpu"):
        raise ValueError(f"a {type(tensor).__name__} without memory on the CPU cannot be saved")
    return [(ctypes.c_char * tensor.nbytes).from_address(address)] if tensor.nbytes else []
