"""Parts of common recipes: which parameters decay, and warmup with a cosine."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def decay_weights(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters, for an optimizer that does not decay biases and norms.

    Example:
        ::

            optimizer = torch.optim.AdamW(decay_weights(model, 0.01), lr=params["lr"])
    """
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def compute_lr_factor(step: int, steps: int, warmup: int) -> float:
    """Return a linear warmup, then half a cosine (Loshchilov and Hutter 2017), from 0 to 1.

    Args:
        step: The index of the training step.
        steps: The number of all training steps.
        warmup: The number of steps during which the factor rises.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
