"""Losses and metrics of single samples, of which means over any number of ranks are made exactly."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def per_sample_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy of each sample, shape (N,), in nats; the mean over a sample's targets where it has many.

    `outputs` are logits or log-probabilities, shape (N, ..., classes), and `targets` classes, shape (N, ...).
    `smoothing` is the share of the probability that is spread over all classes (Szegedy et al. 2016, section 7).
    """
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return losses if targets.dim() == 1 else _average_per_sample(losses.view(targets.shape))


def per_sample_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of right predictions of each sample, shape (N,), from what `cross_entropy` takes."""
    return _average_per_sample((outputs.argmax(-1) == targets).float())


def _average_per_sample(values: torch.Tensor) -> torch.Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)
