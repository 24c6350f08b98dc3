"""The interfaces of data sets that `hpo.training.fit` accepts."""

from __future__ import annotations

from typing import Protocol

import torch


class Samples(Protocol):
    """One part of a data set on a device. ``len`` returns the number of samples."""

    def __len__(self) -> int: ...

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples at the given indices as a batch.

        Args:
            indices: Indices of the samples, int64 of shape (N,), on the CPU.

        Returns:
            The inputs and the targets on the device, both of shape (N, ...).
        """
        ...


class Data(Protocol):
    """A data set with a training and a validation part."""

    def splits(self, device: torch.device) -> tuple[Samples, Samples]:
        """Return the training and the validation part on a device.

        Args:
            device: The device that batches are returned on.

        Returns:
            The training part and the validation part.
        """
        ...
