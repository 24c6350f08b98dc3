"""Dropout whose masks do not depend on the number of ranks or on the strategy by which they share the network.

torch draws a mask for the samples of one rank, so the loss of an individual would depend on the size of its worker.
Here, the mask of a sample is a hash of four numbers: the seed, the training step, the layer, and the position of the
sample in the global batch. Counter-based generators work like this (Salmon et al. 2011). Each rank computes only the
masks of its own samples.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from hpo.training.module_tree import replace_modules

# The multipliers of "lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018) as signed numbers.
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B - (1 << 32)


class DropoutMasks:
    """Draws the masks of all dropout layers of a network for the samples that a rank computes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._calls: dict[int, int] = {}
        self._samples = (0, torch.zeros(0), torch.device("cpu"))
        self._keys: torch.Tensor | None = None

    def begin_forward(self, step: int, positions: torch.Tensor, device: torch.device) -> None:
        """Set the samples of the next forward pass of a network.

        Args:
            step: The index of the training step.
            positions: The positions of the samples in the global batch, int64 of shape (N,).
            device: The device of the masks.
        """
        self._calls.clear()
        self._samples, self._keys = (step, positions, device), None

    def draw_mask(self, layer: int, shape: torch.Size, p: float) -> torch.Tensor:
        """Return a boolean mask, which is True with probability 1 - p, for the input of a dropout layer.

        `shape` is the shape of the input, (N, ...). Raises ValueError if N is not the number of samples. Raises
        RuntimeError in a backward pass: `torch.utils.checkpoint` recomputes the layer, but its mask is not kept.
        """
        samples = len(self._samples[1])
        if shape[0] != samples:
            raise ValueError(
                f"the first dimension of the input of nn.Dropout must be the number of samples, {samples}, got shape "
                f"{tuple(shape)}. Use torch.nn.functional.dropout, which accepts any shape"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "nn.Dropout must be outside of blocks that torch.utils.checkpoint recomputes, got one inside, whose "
                "mask cannot be drawn again. Move the dropout out of the block"
            )
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        if self._keys is None:  # A network without dropout needs no keys.
            step, positions, device = self._samples
            self._keys = _hash_numbers(positions.to(torch.int32).to(device) ^ _mix_to_int32(self._seed, step))
        return compute_mask(_hash_numbers(self._keys ^ _mix_to_int32(layer, call)), shape, p)


class SharedDropout(nn.Module):
    """nn.Dropout with masks from `DropoutMasks`; `layer` is the index of the dropout layer in the network."""

    def __init__(self, p: float, layer: int, draws: DropoutMasks) -> None:
        super().__init__()
        self.p = p
        self._layer = layer
        self._masks = draws

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Zero some elements of each sample of `inputs`, shape (N, ...), and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return inputs
        if self.p == 1:
            return inputs * 0
        mask = self._masks.draw_mask(self._layer, inputs.shape, self.p)
        return inputs * mask.to(inputs).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Return the text in the module's representation."""
        return f"p={self.p}"


def compute_mask(keys: torch.Tensor, shape: torch.Size, p: float) -> torch.Tensor:
    """Return a boolean mask of shape (N, ...), which is True with probability 1 - p.

    `keys` has a random number for each sample, int32 of shape (N,), which determines its mask.
    """
    elements = _hash_numbers(torch.arange(shape[1:].numel(), dtype=torch.int32, device=keys.device))
    bits = keys[:, None] ^ elements
    bits *= _FIRST_MULTIPLIER
    bits ^= bits >> 15
    bits *= _SECOND_MULTIPLIER
    threshold = min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    return (bits >= threshold).view(shape)


def _hash_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32 number; the hashes are practically independent."""
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * _FIRST_MULTIPLIER
    numbers = numbers ^ ((numbers >> 15) & 0x1FFFF)
    numbers = numbers * _SECOND_MULTIPLIER
    return numbers ^ ((numbers >> 16) & 0xFFFF)


def _mix_to_int32(high: int, low: int) -> int:
    """Return a hash of two numbers as a signed 32-bit number."""
    mixed = (high * 0x9E3779B97F4A7C15 + low * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & ((1 << 64) - 1)
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)
    number = (mixed ^ (mixed >> 32)) & 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


def replace_dropout(network: nn.Module, masks: DropoutMasks) -> nn.Module:
    """Replace each nn.Dropout of a network by one whose masks do not depend on the number of ranks.

    Other modules that draw random numbers are not changed. Before each forward pass in training, call
    `masks.begin_forward`.

    Args:
        network: The network, which is changed.
        masks: Draws the masks.

    Returns:
        The network.
    """
    layers = itertools.count()

    def make_shared_dropout(module: nn.Module) -> nn.Module | None:
        return SharedDropout(module.p, next(layers), masks) if type(module) is nn.Dropout else None

    return replace_modules(network, make_shared_dropout)
