"""Write and read checkpoint files: the state of an evaluation with the weights of its lowest loss."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.store.checkpoints import STATE_PREFIX, WEIGHTS_PREFIX, CheckpointInfo, check_space, parse_checkpoint_info
from hpo.store.tensors import compute_checksum, write_tensors
from hpo.text_format import format_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of an evaluation."""

    metadata: CheckpointInfo
    """The hyperparameters, losses and tree of the state."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the state by their names in the tree."""
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)
    """The weights of its lowest loss; None if another individual is the best of the run."""


def write_checkpoint_file(path: Path, state: Checkpoint) -> None:
    """Write a checkpoint durably. Raises OSError if the disk has too little space or writing fails."""
    tensors = _name_tensors(state)
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_space(path, size)
    text = json.dumps({**vars(state.metadata), "has_weights": state.weights is not None})
    parts = ((name, [_view_bytes(tensor)]) for name, tensor in sorted(tensors.items()))
    write_tensors(path, tensors, {"about": text, "checksum": compute_checksum(text, parts)})


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Return the checkpoint in a file, whose checksum the supervisor has verified. Raises ValueError if it is damaged.

    Tensors are mapped, and read from disk when they are used.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - This is not a dict.
        checkpoint_info = parse_checkpoint_info(json.loads(metadata["about"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error
    weights = {name.removeprefix(WEIGHTS_PREFIX): t for name, t in tensors.items() if name.startswith(WEIGHTS_PREFIX)}
    state = {name.removeprefix(STATE_PREFIX): t for name, t in tensors.items() if name.startswith(STATE_PREFIX)}
    return Checkpoint(checkpoint_info, state, weights or None)


def _name_tensors(state: Checkpoint) -> dict[str, Tensor]:
    tensors = {STATE_PREFIX + name: tensor for name, tensor in state.tensors.items()}
    return tensors | {WEIGHTS_PREFIX + name: tensor for name, tensor in (state.weights or {}).items()}


def _view_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor of any type on the CPU."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
