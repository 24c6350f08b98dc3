"""Batch normalisation and dropout whose results do not depend on the number of ranks.

torch's SyncBatchNorm accepts only tensors on GPUs. In the final batch of an epoch, a rank may have
no sample. Then SyncBatchNorm hangs, or sends tensors of another dtype than the other ranks (torch
2.15). Here, the statistics of all ranks are combined by the formula of Chan, Golub and LeVeque
(1979) for the variance of a union. Gradients flow through the statistics (Ioffe and Szegedy 2015,
section 3).

torch draws a dropout mask for the samples of one rank, so the loss of an individual would depend on
the size of its worker. Here, the mask of a sample is a hash of four numbers: the seed, the training
step, the layer, and the position of the sample in the global batch. Counter-based generators work
like this (Salmon et al. 2011). Each rank computes only the masks of its own samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# The multipliers of "lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018) as signed
# numbers.
_FIRST_MULTIPLIER = 0x7FEB352D
_SECOND_MULTIPLIER = 0x846CA68B - (1 << 32)


class SharedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d over the samples of all ranks. A rank may have none."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(
                "the input of batch normalisation must have at least two dimensions, got "
                f"{input.dim()}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise `input`, shape (N, channels, ...)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        exact = torch.promote_types(input.dtype, torch.float32)
        weight: torch.Tensor | None = self.weight
        bias: torch.Tensor | None = self.bias  # A layer may have a weight and no bias.
        if weight is None:
            weight = torch.ones(self.num_features, device=input.device)
        if bias is None:
            bias = torch.zeros(self.num_features, device=input.device)
        output, mean, variance, count = _BatchNormFunction.apply(
            input, weight.to(exact), bias.to(exact), self.eps
        )
        if self.track_running_stats:
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = self.momentum
                if momentum is None:
                    momentum = 1 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * (count / (count - 1)), momentum)
        return output  # type: ignore[no-any-return]


class _BatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> Any:
        inputs = _make_contiguous(inputs)
        mean, variance, count = _compute_statistics(inputs, weight.dtype)
        # torch's kernels divide by the number of samples. With none, they crash the process (torch
        # 2.15, SIGFPE).
        if inputs.numel():
            (output, *_) = torch.native_batch_norm(
                inputs, weight, bias, mean, variance, False, 0.0, eps
            )
        else:
            output = inputs.clone()
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        inverse = torch.rsqrt(variance + ctx.eps)
        if inputs.numel():
            output_gradient = _make_contiguous(gradients[0].to(inputs.dtype))
            # Some of CUDA's kernels read the saved statistics, although this is not a pass in
            # training mode.
            saved = (mean, inverse)
            # This pass treats mean and variance as constants, and also computes both sums over this
            # rank's samples.
            gradient, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                output_gradient, inputs, weight, mean, variance, *saved, False, ctx.eps, [True] * 3
            )
        else:
            gradient = inputs.clone()
            of_weight = torch.zeros_like(weight)
            of_bias = torch.zeros_like(weight)
        sums = torch.stack([of_weight, of_bias])
        dist.all_reduce(sums)
        # The gradient through mean and variance is linear in the input of each channel.
        slope = -weight * inverse * inverse * sums[0] / count
        offset = -weight * inverse * sums[1] / count - slope * mean
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        gradient.add_(offset.view(shape)).addcmul_(inputs, slope.view(shape))
        return gradient, of_weight, of_bias, None


def _compute_statistics(
    inputs: torch.Tensor, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each channel's mean, variance and number of values, over all ranks.

    Mean and variance have shape (channels,). `exact` is their type.
    """
    channels = inputs.shape[1]
    ours = torch.zeros(2 * channels + 1, dtype=exact, device=inputs.device)
    count = inputs.numel() // channels
    if count:
        # For 16-bit inputs, the kernel returns 32-bit statistics only if it has 32-bit buffers to
        # update.
        buffers = ours.new_zeros(2, channels)
        mean, variance = torch.ops.aten.batch_norm_update_stats(inputs, buffers[0], buffers[1], 0.0)
        ours = torch.cat([mean, variance, ours.new_full((1,), count)])
    parts = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, ours)
    every = torch.stack(parts).double()
    means, variances, counts = every.split([channels, channels, 1], dim=1)  # type: ignore[no-untyped-call]
    total = counts.sum()
    if count < 2 and total < 2:  # To read the total, the host must wait for the device.
        raise ValueError(
            "batch normalisation must have at least two values per channel in training, got "
            f"{int(total)}"
        )
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    return mean.to(exact), variance.to(exact), total.to(exact)


def _make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is contiguous or in channels-last format, a copy if necessary."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def replace_batch_norm(network: nn.Module) -> nn.Module:
    """Replace each batch normalisation by one over the samples of all ranks. Return the network.

    Its results do not depend on the number of ranks, and a rank may have no sample. The names of
    weights stay. With one rank, nothing is replaced.
    """

    def make_shared(module: nn.Module) -> nn.Module | None:
        own = (SharedBatchNorm, nn.SyncBatchNorm)
        if not isinstance(module, _BatchNorm) or isinstance(module, own):
            return None
        shared = SharedBatchNorm(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
        )
        shared._parameters.update(module._parameters)
        shared._buffers.update(module._buffers)
        return shared

    if dist.get_world_size() == 1:
        return network
    return replace_modules(network, make_shared)


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
        self._samples = (step, positions, device)
        self._keys = None

    def draw_mask(self, layer: int, shape: torch.Size, p: float) -> torch.Tensor:
        """Return a boolean mask for the input of a dropout layer, True with probability 1 - p.

        `shape` is the shape of the input, (N, ...). Raises ValueError if N is not the number of
        samples. Raises RuntimeError in a backward pass: `torch.utils.checkpoint` recomputes the
        layer, but its mask is not kept.
        """
        samples = len(self._samples[1])
        if shape[0] != samples:
            raise ValueError(
                "the first dimension of the input of nn.Dropout must be the number of samples, "
                f"{samples}, got shape {tuple(shape)}. Use torch.nn.functional.dropout, which "
                "accepts any shape"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "nn.Dropout must be outside of blocks that torch.utils.checkpoint recomputes, got "
                "one inside, whose mask cannot be drawn again. Move the dropout out of the block"
            )
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        if self._keys is None:  # A network without dropout needs no keys.
            step, positions, device = self._samples
            self._keys = _hash_numbers(
                positions.to(torch.int32).to(device) ^ _mix_to_int32(self._seed, step)
            )
        # The key of a sample determines its mask.
        keys = _hash_numbers(self._keys ^ _mix_to_int32(layer, call))
        elements = torch.arange(shape[1:].numel(), dtype=torch.int32, device=keys.device)
        bits = keys[:, None] ^ _hash_numbers(elements)
        bits *= _FIRST_MULTIPLIER
        bits ^= bits >> 15
        bits *= _SECOND_MULTIPLIER
        threshold = min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)
        return (bits >= threshold).view(shape)


class SharedDropout(nn.Module):
    """nn.Dropout with masks from `DropoutMasks`; `layer` is its index in the network."""

    def __init__(self, p: float, layer: int, draws: DropoutMasks) -> None:
        super().__init__()
        self.p = p
        self._layer = layer
        self.masks = draws

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Zero some elements of `inputs`, shape (N, ...), and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return inputs
        if self.p == 1:
            return inputs * 0
        mask = self.masks.draw_mask(self._layer, inputs.shape, self.p)
        return inputs * mask.to(inputs).mul_(1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Return the text in the module's representation."""
        return f"p={self.p}"


def _hash_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int32 number; the hashes are practically independent."""
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * _FIRST_MULTIPLIER
    numbers = numbers ^ ((numbers >> 15) & 0x1FFFF)
    numbers = numbers * _SECOND_MULTIPLIER
    return numbers ^ ((numbers >> 16) & 0xFFFF)


def _mix_to_int32(high: int, low: int) -> int:
    """Return a hash of two numbers as a signed 32-bit number."""
    mixed = (high * 0x9E3779B97F4A7C15 + low * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (
        (1 << 64) - 1
    )
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)
    number = (mixed ^ (mixed >> 32)) & 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


def replace_dropout(network: nn.Module, masks: DropoutMasks) -> nn.Module:
    """Replace each nn.Dropout of a network by one whose masks do not depend on the number of ranks.

    Other modules that draw random numbers are not changed. Before each forward pass in training,
    call `masks.begin_forward`. The network is changed in place, and returned.
    """
    layers = itertools.count()

    def make_shared(module: nn.Module) -> nn.Module | None:
        return SharedDropout(module.p, next(layers), masks) if type(module) is nn.Dropout else None

    return replace_modules(network, make_shared)


def replace_modules(
    network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]
) -> nn.Module:
    """Replace modules of a network in place, and return the network or its replacement.

    `replacement` is called once for each module, in the order of `modules()`, and returns None to
    keep it. A module that occurs several times has one replacement.
    """
    replacements = {module: replacement(module) for module in network.modules()}
    for parent in list(network.modules()):
        for name, child in list_children(parent):
            new_child = replacements[child]
            if new_child is not None:
                setattr(parent, name, new_child.train(child.training))
    return replacements[network] or network


def list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children by name; unlike in torch, a child under each of its names."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def convert_to_channels_last(network: nn.Module) -> nn.Module:
    """Convert the weights of two-dimensional convolutions to channels-last format, which is faster.

    `Module.to(memory_format=...)` fails for networks with three-dimensional convolutions.
    """
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network
