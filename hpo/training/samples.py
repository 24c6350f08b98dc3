"""What a training needs of a data set: samples on a device."""

from __future__ import annotations

from typing import Protocol

import torch


class Samples(Protocol):
    """Samples on a device, of which batches are made."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs (N, ...) and the targets (N, ...) at `indices`, int64 of shape (N,) on the CPU."""
        ...


class Data(Protocol):
    """A data set: its training and its validation part."""

    def splits(self, device: torch.device) -> tuple[Samples, Samples]:
        """Return the training and the validation part on a device."""
        ...
