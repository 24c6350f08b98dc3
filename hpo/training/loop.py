"""Parts of a training loop: settings, weight decay, learning rate, validation, early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hpo.prediction import Prediction

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

_MAX_PREDICTIONS = 20  # The most correct predictions, and the most wrong ones.


def check_positive(settings: object, *names: str) -> None:
    """Raise a ValueError if one of the named attributes of `settings` is less than 1.

    Example:
        ::

            check_positive(settings, "epochs", "batch_size")
    """
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError if the setting `name` has a value that is not among `choices`.

    Example:
        ::

            check_choice("optimizer", settings.optimizer, ("sgd", "adamw"))
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")


def check_count(setting: str, count: int, available: int, of: str) -> int:
    """Return a number of samples, all if `count` is 0; ValueError if there are too few."""
    if not 0 <= count <= available:
        raise ValueError(
            f"{setting} must be at most {available}, the number of such samples of {of}, or 0 for "
            f"all of them, got {count}"
        )
    return count or available


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


@torch.no_grad()
def compute_means(
    measure: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    samples: int,
    worker: Worker,
    *,
    batch_size: int = 256,
    is_shared: bool = True,
) -> list[float]:
    """Compute means over samples that the ranks share. Collective: call on all ranks.

    The means do not depend on the number of ranks, even if ranks have different numbers of samples.
    A mean of the ranks' means would. They are added up in float64.

    Args:
        measure: A function from indices of samples, int64 of shape (N,) on the CPU, to losses and
            metrics of each sample, of shape (N,) each. N may be 0.
        samples: Number of samples; indices are 0 to ``samples - 1``.
        batch_size: The largest N.
        is_shared: Whether ranks share the samples. If not, each rank measures all, as with a
            `Pipeline`.

    Returns:
        The mean of each loss and metric, the same on all ranks.

    Raises:
        ValueError: `measure` does not return one number per sample.

    Example:
        ::

            def measure(indices):
                outputs = network(images[indices])
                losses = cross_entropy(outputs, labels[indices], reduction="none")
                return losses, outputs.argmax(1) == labels[indices]

            loss, accuracy = compute_means(measure, len(labels), worker)
    """
    first = worker.rank if is_shared else 0
    step = worker.size if is_shared else 1
    sums = torch.zeros((), dtype=torch.float64, device=worker.device)
    for batch in torch.arange(samples).split(batch_size * step):  # type: ignore[no-untyped-call]
        mine = batch[first::step]
        measured = measure(mine)
        for values in measured:
            if values.shape != mine.shape:
                raise ValueError(
                    f"measure must return a number for each sample, shape ({len(mine)},), got "
                    f"shape {tuple(values.shape)}. Losses of torch do with reduction='none'"
                )
        sums = sums + torch.stack([values.double().sum() for values in measured])
    dist.all_reduce(sums)
    # Without shares, the sum over the ranks has each sample once for each rank.
    means: list[float] = (sums / (samples * worker.size // step)).tolist()
    return means


def should_stop_early(losses: Sequence[float], patience: int) -> bool:
    """Return whether none of the last `patience` losses is a new lowest; False if 0.

    Args:
        losses: The validation loss of each epoch so far.
        patience: The number of epochs in a row without a new lowest loss after which a training
            ends.
    """
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def select_predictions(
    images: torch.Tensor,
    probabilities: torch.Tensor,
    labels: torch.Tensor,
    class_names: Sequence[str],
) -> list[Prediction]:
    """Select predictions of an image classifier for the report.

    Args:
        images: Images, shape (N, channels, height, width), of 1 or 3 channels. The values of each
            are scaled to 0 to 255, so images may be normalised.
        probabilities: Probabilities of the classes, shape (N, classes).
        labels: Labels, int64 of shape (N,).
        class_names: The names of the classes, in the order of the labels.

    Returns:
        The 20 wrong predictions with the highest confidence, and 20 correct ones, evenly spaced.
    """
    confidence, predicted = probabilities.max(dim=1)
    right = torch.nonzero(predicted == labels).flatten()
    wrong = torch.nonzero(predicted != labels).flatten()
    worst = wrong[confidence[wrong].argsort(descending=True)][:_MAX_PREDICTIONS]
    steps = torch.linspace(0, max(0, len(right) - 1), min(_MAX_PREDICTIONS, len(right)))
    predictions = []
    for index in [*worst.tolist(), *right[steps.long()].tolist()]:
        values = images[index].cpu().numpy().astype(np.float64)
        values -= values.min()
        picture = np.rint(values * (255 / max(values.max(), 1e-9))).astype(np.uint8)
        predictions.append(
            Prediction(
                picture[0] if len(picture) == 1 else np.moveaxis(picture, 0, -1),
                class_names[int(labels[index])],
                class_names[int(predicted[index])],
                confidence[index].item(),
            )
        )
    return predictions
