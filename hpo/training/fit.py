"""Training a classifier on a worker's ranks, as one process would train it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR

from hpo.training.data import Dataset, Split

if TYPE_CHECKING:
    from hpo.evaluation.worker import Worker

_VALIDATION_BATCH = 256


@dataclass(frozen=True)
class Schedule:
    """How a network is trained.

    `batch_size` is the size of the global batch, which is divided among the ranks; `lr` is multiplied by `gamma` after
    every epoch. Training ends after `epochs` epochs, or after `patience` epochs in a row without a new best loss.
    """

    epochs: int
    batch_size: int
    patience: int
    lr: float
    gamma: float


def fit(
    network: nn.Module, data: Dataset, worker: Worker, schedule: Schedule
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train with Adadelta (Zeiler 2012), and yield the validation loss and ``{"accuracy": ...}`` after each epoch.

    `network` returns log-probabilities, shape (N, classes). Its weights are offered before each yield. The order of the
    samples follows from the worker's seed and is the same on all ranks.
    """
    network = network.to(worker.device).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(network)
    optimizer = Adadelta(model.parameters(), lr=schedule.lr)
    decay = StepLR(optimizer, step_size=1, gamma=schedule.gamma)
    generator = torch.Generator().manual_seed(worker.seed)
    train, validation = OnDevice(data.train, data, worker.device), OnDevice(data.validation, data, worker.device)
    ours = torch.arange(worker.rank, len(validation), worker.size)
    best, epochs_since_best = float("inf"), 0
    for _ in range(schedule.epochs):
        order = torch.randperm(len(train), generator=generator)
        train_epoch(model, optimizer, train, _split(order, schedule.batch_size), worker.rank, worker.size)
        decay.step()
        sums = loss_and_hits(network, validation, ours)
        dist.all_reduce(sums)
        loss, accuracy = (sums / len(validation)).tolist()
        worker.offer(network.state_dict())
        yield loss, {"accuracy": accuracy}
        best, epochs_since_best = (loss, 0) if loss < best else (best, epochs_since_best + 1)
        if epochs_since_best >= schedule.patience:
            return


def check_positive(settings: object, *names: str) -> None:
    """Raise a ValueError unless these settings are at least 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(settings, name)}")


class OnDevice:
    """A split as tensors on a device: views of the host's one copy on a CPU, a copy on each GPU."""

    def __init__(self, split: Split, data: Dataset, device: torch.device) -> None:
        self.device = device
        self._images = torch.from_numpy(split.images).to(device)
        self._labels = torch.from_numpy(split.labels).to(device)
        self._mean = torch.from_numpy(data.mean).to(device).view(1, -1, 1, 1)
        self._scale = 1 / torch.from_numpy(data.std).to(device).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised images (N, C, H, W) and the labels (N) at `indices`."""
        indices = indices.to(self.device)
        images = self._images[indices].to(torch.float32).sub_(self._mean).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last), self._labels[indices]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: OnDevice,
    batches: Sequence[torch.Tensor],
    rank: int = 0,
    size: int = 1,
) -> None:
    """Take a training step for each global batch of sample indices; this rank computes its share of the batch."""
    model.train()
    for batch in batches:
        images, labels = train.batch(batch[rank::size])
        optimizer.zero_grad()
        # DDP averages gradients over ranks, whose shares of a batch may differ by a sample: weighted like this, the
        # average is the gradient of the global batch's mean loss.
        loss = F.nll_loss(model(images), labels, reduction="sum") * (size / len(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def loss_and_hits(network: nn.Module, split: OnDevice, indices: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses and the number of right predictions at `indices`, as a float64 tensor of two."""
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=split.device)
    for part in _split(indices, _VALIDATION_BATCH):
        images, labels = split.batch(part)
        output = network(images)
        sums[0] += F.nll_loss(output, labels, reduction="none").double().sum()
        sums[1] += (output.argmax(dim=1) == labels).sum()
    return sums


def _split(indices: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    return indices.split(size)  # type: ignore[no-any-return, no-untyped-call]
