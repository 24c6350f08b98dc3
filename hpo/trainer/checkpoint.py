"""What an evaluation continues from: written to a file with the weights of its lowest loss, and read again."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.store.states import STATE, WEIGHTS, About, about_of, check_space
from hpo.store.tensors import compute_checksum, write_tensors
from hpo.text import message

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class State:
    """The state of an evaluation: what is known of it, the tensors of its tree, and the weights of its lowest loss.

    The weights are None if another individual is the best of the run.
    """

    about: About
    tensors: Mapping[str, Tensor] = field(repr=False)
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)


def write_state(path: Path, state: State) -> None:
    """Write a state; it is durable when this returns.

    Raises OSError if the disk would be full, and whatever writing raises.
    """
    tensors = _named(state)
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_space(path, size)
    text = json.dumps({**vars(state.about), "has_weights": state.weights is not None})
    parts = ((name, [_bytes(tensor)]) for name, tensor in sorted(tensors.items()))
    write_tensors(path, tensors, {"about": text, "checksum": compute_checksum(text, parts)})


def read_state(path: Path) -> State:
    """Return the state in a file; tensors are read when used. Raises ValueError, saying why, if it cannot be read.

    The supervisor has compared the bytes with their checksum.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        about = about_of(json.loads(metadata["about"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {message(error)}") from error
    weights = {name.removeprefix(WEIGHTS): t for name, t in tensors.items() if name.startswith(WEIGHTS)}
    state = {name.removeprefix(STATE): t for name, t in tensors.items() if name.startswith(STATE)}
    return State(about, state, weights or None)


def _named(state: State) -> dict[str, Tensor]:
    tensors = {STATE + name: tensor for name, tensor in state.tensors.items()}
    return tensors | {WEIGHTS + name: tensor for name, tensor in (state.weights or {}).items()}


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor that is contiguous and on the CPU, of any type."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
