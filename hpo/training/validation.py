"""Measure a network: means over shared samples, early stopping, predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hpo.prediction import Prediction

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

_MAX_PREDICTIONS = 20  # The most correct predictions, and the most wrong ones.


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
        worker: The worker that the objective gets.
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
    share = slice(worker.rank, None, worker.size) if is_shared else slice(None)
    size = batch_size * worker.size if is_shared else batch_size
    sums = torch.zeros((), dtype=torch.float64, device=worker.device)
    for batch in torch.arange(samples).split(size):  # type: ignore[no-untyped-call]
        mine = batch[share]
        sums = sums + torch.stack([_sum_per_sample(values, len(mine)) for values in measure(mine)])
    dist.all_reduce(sums)
    means: list[float] = (sums / (samples if is_shared else samples * worker.size)).tolist()
    return means


def _sum_per_sample(values: torch.Tensor, samples: int) -> torch.Tensor:
    if values.shape != (samples,):
        raise ValueError(
            f"measure must return a number for each sample, shape ({samples},), got shape "
            f"{tuple(values.shape)}. Losses of torch do with reduction='none'"
        )
    return values.double().sum()


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
    correct = right[
        torch.linspace(0, max(0, len(right) - 1), min(_MAX_PREDICTIONS, len(right))).long()
    ]
    return [
        Prediction(
            _make_picture(images[index].cpu().numpy()),
            class_names[int(labels[index])],
            class_names[int(predicted[index])],
            confidence[index].item(),
        )
        for index in [*worst.tolist(), *correct.tolist()]
    ]


def _make_picture(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return an image (channels, height, width) for display, with its values scaled to 0 to 255."""
    values = image.astype(np.float64) - image.min()
    picture: npt.NDArray[np.uint8] = np.rint(values * (255 / max(values.max(), 1e-9))).astype(
        np.uint8
    )
    return np.moveaxis(picture, 0, -1).squeeze(-1 if len(image) == 1 else ())
