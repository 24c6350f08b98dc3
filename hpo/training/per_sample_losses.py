"""Compute losses and metrics per sample, so that their mean over all samples is the same on any number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def per_sample_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Compute the cross-entropy of each sample. If a sample has several targets, it is the mean over them.

    Args:
        outputs: Logits or log-probabilities, shape (N, ..., classes).
        targets: Class indices, int64 of shape (N, ...).
        smoothing: Probability that is spread over all classes, 0 to 1 (label smoothing: Szegedy et al. 2016,
            section 7).

    Returns:
        The losses in nats, shape (N,).

    Example:
        ::

            losses = per_sample_cross_entropy(network(images), labels)  # shape (N,)
            losses.mean().backward()
    """
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return losses if targets.dim() == 1 else _average_per_sample(losses.view(targets.shape))


def per_sample_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the accuracy of each sample, which is the fraction of its targets that are predicted correctly.

    Args:
        outputs: Logits or log-probabilities, shape (N, ..., classes).
        targets: Class indices, int64 of shape (N, ...).

    Returns:
        The accuracies, 0 to 1, float32 of shape (N,).

    Example:
        ::

            accuracy = per_sample_accuracy(network(images), labels).mean()
    """
    return _average_per_sample((outputs.argmax(-1) == targets).float())


def _average_per_sample(values: torch.Tensor) -> torch.Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)
