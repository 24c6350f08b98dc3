"""Read checkpoint files, and write drafts: files with a saved state, or with weights.

The leader makes checkpoint and weights files from drafts.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hpo.store.checkpoints import STATE_PREFIX, CheckpointInfo, parse_checkpoint_info
from hpo.store.tensors import TensorBytes, read_header, write_file
from hpo.text_format import format_error
from hpo.trainer.state_tree import StateParts


@dataclass(frozen=True)
class Checkpoint:
    """The state that an objective has saved, and the progress of its evaluation."""

    metadata: CheckpointInfo
    """The hyperparameters, the losses so far, and the state as a tree with names instead of tensors."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the state. The keys are their names in the tree."""


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Return the checkpoint in a file. Raises ValueError if the file cannot be read.

    The checksum is not verified here, because the leader has verified it. Tensors are mapped: their
    data are read from disk when they are used.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - This is not a dict.
        checkpoint_info = parse_checkpoint_info(json.loads(metadata["about"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error
    state = {
        name.removeprefix(STATE_PREFIX): t
        for name, t in tensors.items()
        if name.startswith(STATE_PREFIX)
    }
    return Checkpoint(checkpoint_info, state)


def write_checkpoint_draft(path: Path, parts: StateParts) -> None:
    """Write a gathered state, without flushing it to disk."""
    tensors = {STATE_PREFIX + name: tensor for name, tensor in parts.leaves.items()}
    write_tensors(path, tensors, {"tree": json.dumps(parts.tree)})


def write_weights_draft(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name, without flushing them to disk."""
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in weights.items()}
    # The writer explains why it cannot write a sparse tensor.
    tensors = {
        name: t.to("cpu").contiguous() if t.layout == torch.strided else t
        for name, t in plain.items()
    }
    write_tensors(path, tensors, {})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write CPU tensors and texts to a safetensors file, without flushing it to disk.

    safetensors 0.8 would write to a file with a random name first. If the process is killed, this
    file would stay.
    """
    write_file(
        path,
        {name: _view_tensor(tensor) for name, tensor in tensors.items()},
        texts,
        is_flushed=False,
    )


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

    Raises ValueError or RuntimeError if the tensor has no such memory, as tensors of some
    subclasses have none.
    """
    address = tensor.data_ptr()
    if tensor.nbytes and (not address or tensor.device.type != "cpu"):
        raise ValueError(f"a {type(tensor).__name__} without memory on the CPU cannot be saved")
    return [(ctypes.c_char * tensor.nbytes).from_address(address)] if tensor.nbytes else []
