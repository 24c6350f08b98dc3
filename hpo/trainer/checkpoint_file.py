"""Write and read checkpoint files, which have the saved state of an evaluation and the weights of its lowest loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from hpo.store.checkpoints import STATE_PREFIX, WEIGHTS_PREFIX, CheckpointInfo, check_space, parse_checkpoint_info
from hpo.store.tensors import compute_checksum
from hpo.text_format import format_error
from hpo.trainer.tensor_writer import view_bytes, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file: an objective's saved state, and the weights of the evaluation's lowest loss."""

    metadata: CheckpointInfo
    """The hyperparameters, the losses so far, and the state as a tree with names instead of tensors."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the state. The keys are their names in the tree."""
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)
    """The weights of the evaluation's lowest loss; None if the run has kept no weights for this loss."""


def write_checkpoint_file(path: Path, state: Checkpoint) -> None:
    """Write a checkpoint to a file, and flush it to the disk. Raises OSError if the disk is full or writing fails."""
    tensors = _name_tensors(state)
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_space(path, size)
    text = json.dumps({**vars(state.metadata), "has_weights": state.weights is not None})
    parts = ((name, view_bytes(tensor)) for name, tensor in sorted(tensors.items()))
    write_tensors(path, tensors, {"about": text, "checksum": compute_checksum(text, parts)})


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Return the checkpoint in a file. Raises ValueError if the file cannot be read.

    The checksum is not verified here, because the supervisor (MPI process of this rank) has verified it. Tensors are
    mapped: their data are read from disk when they are used.
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
