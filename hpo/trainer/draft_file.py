"""Write drafts: files with a saved state, or with weights, from which the leader makes checkpoint and weights files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpo.store.checkpoints import STATE_PREFIX
from hpo.trainer.tensor_writer import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.trainer.state_tree import StateParts


def write_checkpoint_draft(path: Path, parts: StateParts) -> None:
    """Write a gathered state, without flushing it to disk."""
    tensors = {STATE_PREFIX + name: tensor for name, tensor in parts.leaves.items()}
    write_tensors(path, tensors, {"tree": json.dumps(parts.tree)})


def write_weights_draft(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name, without flushing them to disk."""
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in weights.items()}
    # The writer explains why it cannot write a sparse tensor.
    tensors = {name: t.to("cpu").contiguous() if t.layout == torch.strided else t for name, t in plain.items()}
    write_tensors(path, tensors, {})
