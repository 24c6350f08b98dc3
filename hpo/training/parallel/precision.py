"""Mixed precision: most computations in 16 bits, and a gradient scaler that keeps small float16 gradients above 0."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch uses `precision` for all operations for which it is safe."""
    if precision == "float32":
        return nullcontext()
    # A cache would keep the cast weights of a sharded block, and mix the graphs of microbatches.
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


class SharedGradScaler(GradScaler):
    """A GradScaler for float16 (Micikevicius et al. 2018) with which all ranks skip the same steps.

    torch's GradScaler looks for overflows only in a rank's own gradients. If ranks have different parameters, they
    would skip different steps, and use different scales afterwards.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        del allow_fp16
        gradients = [
            _get_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        found = found_inf.clone()
        for device in {gradient.device for gradient in gradients}:
            ours, here = [g for g in gradients if g.device == device and g.numel()], found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(ours, here, inv_scale.to(device))
            found = torch.maximum(found, here.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found}


def make_grad_scaler(precision: str, device: torch.device) -> GradScaler:
    """Return the gradient scaler, which is disabled unless the precision is float16."""
    # torch begins with 2 ** 16 and skips steps until the scale fits. Short trainings have too few steps for this.
    scaler = SharedGradScaler(device.type, init_scale=2.0**10, growth_interval=500, enabled=precision == "float16")
    # The first call initialises the scale. Only the last stage of a pipeline would make it later.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def _get_local(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
