"""Batch normalisation over the samples of all ranks, on any device.

torch's SyncBatchNorm accepts only tensors on GPUs. In the final batch of an epoch, a rank may have no sample. Then
SyncBatchNorm hangs, or sends tensors of another dtype than the other ranks (torch 2.15). Here, the statistics of all
ranks are combined by the formula of Chan, Golub and LeVeque (1979) for the variance of a union. Gradients flow through
the statistics (Ioffe and Szegedy 2015, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpo.training.module_tree import replace_modules


class SharedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d, 2d or 3d that uses the statistics of all ranks in training. A rank may have no sample."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"the input of batch normalisation must have at least two dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise `input`, shape (N, channels, ...)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        weight = torch.ones(self.num_features, device=input.device) if self.weight is None else self.weight
        bias = torch.zeros(self.num_features, device=input.device) if self.bias is None else self.bias
        exact = torch.promote_types(input.dtype, torch.float32)
        output, mean, variance, count = _BatchNormFunction.apply(input, weight.to(exact), bias.to(exact), self.eps)
        if self.track_running_stats:
            self._update_running_stats(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * (count / (count - 1)), share)


class _BatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
        inputs = _make_contiguous(inputs)
        mean, variance, count = _compute_statistics(inputs, weight.dtype)
        # torch's kernels divide by the number of samples. With none, they crash the process (torch 2.15, SIGFPE).
        if inputs.numel():
            output = torch.native_batch_norm(inputs, weight, bias, mean, variance, False, 0.0, eps)[0]
        else:
            output = inputs.clone()
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        # This pass treats mean and variance as constants, and also computes both sums over this rank's samples.
        if inputs.numel():
            gradient, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                _make_contiguous(gradients[0].to(inputs.dtype)),
                # Some of CUDA's kernels read the saved statistics, although this is not a pass in training mode.
                *(inputs, weight, mean, variance, mean, torch.rsqrt(variance + ctx.eps), False, ctx.eps, [True] * 3),
            )
        else:
            gradient, of_weight, of_bias = inputs.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
        sums = torch.stack([of_weight, of_bias])
        dist.all_reduce(sums)
        # The gradient through mean and variance is linear in the input of each channel.
        inverse = torch.rsqrt(variance + ctx.eps)
        slope = -weight * inverse * inverse * sums[0] / count
        offset = -weight * inverse * sums[1] / count - slope * mean
        shape = [1, -1] + [1] * (inputs.dim() - 2)
        gradient.add_(offset.view(shape)).addcmul_(inputs, slope.view(shape))
        return gradient, of_weight, of_bias, None


def _compute_statistics(inputs: torch.Tensor, exact: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, the variance and the number of values of each channel, over the samples of all ranks.

    Mean and variance have shape (channels,). `exact` is their type.
    """
    channels = inputs.shape[1]
    ours = torch.zeros(2 * channels + 1, dtype=exact, device=inputs.device)
    count = inputs.numel() // channels
    if count:
        # For 16-bit inputs, the kernel returns 32-bit statistics only if it has 32-bit buffers to update.
        buffers = ours.new_zeros(2, channels)
        mean, variance = torch.ops.aten.batch_norm_update_stats(inputs, buffers[0], buffers[1], 0.0)
        ours = torch.cat([mean, variance, ours.new_full((1,), count)])
    parts = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, ours)
    every = torch.stack(parts).double()
    means, variances, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
    total = counts.sum()
    if count < 2 and total < 2:  # To read the total, the host must wait for the device.
        raise ValueError(f"batch normalisation must have at least two values per channel in training, got {int(total)}")
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    return mean.to(exact), variance.to(exact), total.to(exact)


def _make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor, or the tensor itself if it is contiguous or in channels-last format."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def replace_batch_norm(network: nn.Module) -> nn.Module:
    """Replace each batch normalisation of a network by one that uses the statistics of all ranks, for any device.

    Its results do not depend on the number of ranks, and a rank may have no sample. The names of weights stay. With one
    rank, nothing is replaced.

    Args:
        network: The network, which is changed.

    Returns:
        The network.
    """
    return replace_modules(network, _make_shared_batch_norm) if dist.get_world_size() > 1 else network


def _make_shared_batch_norm(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, _BatchNorm) or isinstance(module, (SharedBatchNorm, nn.SyncBatchNorm)):
        return None
    shared = SharedBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    shared.weight, shared.bias = module.weight, module.bias
    shared.running_mean, shared.running_var = module.running_mean, module.running_var
    shared.num_batches_tracked = module.num_batches_tracked
    return shared
