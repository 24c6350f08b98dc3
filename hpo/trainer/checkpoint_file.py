"""Read the saved state in checkpoint files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from hpo.store.checkpoints import STATE_PREFIX, CheckpointInfo, parse_checkpoint_info
from hpo.text_format import format_error

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """The state that an objective has saved, and the progress of its evaluation."""

    metadata: CheckpointInfo
    """The hyperparameters, the losses so far, and the state as a tree with names instead of tensors."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the state. The keys are their names in the tree."""


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
    state = {name.removeprefix(STATE_PREFIX): t for name, t in tensors.items() if name.startswith(STATE_PREFIX)}
    return Checkpoint(checkpoint_info, state)
