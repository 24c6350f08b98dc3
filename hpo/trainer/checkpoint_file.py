"""What an evaluation continues from: written to a file with the weights of its lowest loss, and read again."""

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
    """The state of an evaluation: what is known of it, the tensors of its tree, and the weights of its lowest loss.

    The weights are None if another individual is the best of the run.
    """

    metadata: CheckpointInfo
    tensors: Mapping[str, Tensor] = field(repr=False)
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)


def write_checkpoint_file(path: Path, state: Checkpoint) -> None:
    """Write a state; it is durable when this returns.

    Raises OSError if the disk would be full, and whatever writing raises.
    """
    tensors = _name_tensors(state)
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_space(path, size)
    text = json.dumps({**vars(state.metadata), "has_weights": state.weights is not None})
    parts = ((name, [_view_bytes(tensor)]) for name, tensor in sorted(tensors.items()))
    write_tensors(path, tensors, {"about": text, "checksum": compute_checksum(text, parts)})


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Return the state in a file; tensors are read when used. Raises ValueError, saying why, if it cannot be read.

    The supervisor has compared the bytes with their checksum.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        about = parse_checkpoint_info(json.loads(metadata["about"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error
    weights = {name.removeprefix(WEIGHTS_PREFIX): t for name, t in tensors.items() if name.startswith(WEIGHTS_PREFIX)}
    state = {name.removeprefix(STATE_PREFIX): t for name, t in tensors.items() if name.startswith(STATE_PREFIX)}
    return Checkpoint(about, state, weights or None)


def _name_tensors(state: Checkpoint) -> dict[str, Tensor]:
    tensors = {STATE_PREFIX + name: tensor for name, tensor in state.tensors.items()}
    return tensors | {WEIGHTS_PREFIX + name: tensor for name, tensor in (state.weights or {}).items()}


def _view_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor that is contiguous and on the CPU, of any type."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
