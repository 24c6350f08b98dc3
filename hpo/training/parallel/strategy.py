"""The interface of all strategies: gradients of a global batch, sums of losses, and the state dict of the network.

A strategy is the way in which the ranks of a worker share the training of a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from hpo.training.parallel.dropout import DropoutMasks
from hpo.training.parallel.precision import make_autocast, make_grad_scaler

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker
    from hpo.training.parallel.settings import ParallelSettings

# A function from positions in a batch, int64 of shape (N,) on the CPU, to the inputs and the targets.
LoadBatch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# A loss or metric: a function from a network's outputs and the targets to a number per sample, shape (N,).
PerSampleFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GlobalBatch:
    """The samples of one training step, which the ranks share.

    Args:
        load: A function from positions in the batch, int64 of shape (N,), to the inputs and the targets.
        size: Number of samples; positions are 0 to ``size - 1``.
        step: Number of earlier training steps, in all epochs. It determines the dropout masks.
        loss: A function from outputs and targets to the loss of each sample, shape (N,).
    """

    def __init__(self, load: LoadBatch, size: int, step: int, loss: PerSampleFunction) -> None:
        self.load = load
        self.size = size
        self.step = step
        self.loss = loss

    def split_positions(self, count: int) -> Sequence[torch.Tensor]:
        """Divide the positions into at most `count` parts of equal size; the final part may be smaller."""
        return divide_into_parts(torch.arange(self.size), count)


class ParallelStrategy(ABC):
    """A network that a worker's ranks train together. Collective: call the constructor and all methods on all ranks.

    Losses and gradients are the means over the global batch, as if a single process computed all of it.
    """

    def __init__(self, worker: Worker, settings: ParallelSettings) -> None:
        self.rank = worker.rank
        self.size = worker.size
        self.device = worker.device
        self.settings = settings
        self.dropout_masks = DropoutMasks(worker.seed)
        self.scaler = make_grad_scaler(settings.precision, worker.device)

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters, or its shards of them, with their names in the whole network."""

    @abstractmethod
    def compute_gradients(self, batch: GlobalBatch) -> torch.Tensor:
        """Compute the gradients of the batch's mean loss, and add them to ``grad`` of this rank's parameters.

        The gradients are multiplied by the scale of `scaler`, which is 1 unless the precision is float16.

        Args:
            batch: The global batch.

        Returns:
            This rank's part of the mean loss, a float64 scalar; its sum over all ranks is the mean loss.
        """

    @abstractmethod
    def compute_sums(
        self, load: LoadBatch, samples: int, max_samples: int, measures: Sequence[PerSampleFunction]
    ) -> torch.Tensor:
        """Compute the sum of each measure (loss or metric) over all samples, without gradients.

        Args:
            load: A function from positions, int64 of shape (N,), to the inputs and the targets.
            samples: Number of samples; positions are 0 to ``samples - 1``.
            max_samples: The largest number of samples that a rank computes at a time.
            measures: Losses or metrics.

        Returns:
            The sums, float64 of shape (measures,), the same on all ranks.
        """

    @abstractmethod
    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the state dict of the whole network on the leader. It is undefined on other ranks."""

    @abstractmethod
    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return whole tensors on the leader. On other ranks, the result is undefined.

        `tensors` has this rank's tensors, or its shards of them, such as optimizer state. The result has the same
        names.
        """

    def select_shard(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - for shards
        """Return this rank's shard of `tensor`, a whole tensor of optimizer state with the shape of `parameter`."""
        return tensor

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state dict of the whole network. Each rank must have all of it."""

    def compute_total_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the gradients of all parameters of the whole network, a scalar."""
        return get_total_norm([p.grad for _, p in self.named_parameters() if p.grad is not None])

    def compute_outputs(self, network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a network, computed with `settings.precision`."""
        with make_autocast(self.settings.precision, self.device):
            return network(inputs)  # type: ignore[no-any-return]


class DataParallelStrategy(ParallelStrategy):
    """A strategy in which each rank computes its share of each batch with the whole network."""

    network: nn.Module  # All of it must be in training mode at the beginning.

    def compute_gradients(self, batch: GlobalBatch) -> torch.Tensor:  # noqa: D102 - as above
        if not self.network.training:  # train() visits all modules, which takes 1% of the step of a small network.
            self.network.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # A pipeline on a worker of one rank has no stages, so its microbatches are computed as parts.
        parts = [
            micro
            for part in batch.split_positions(self.settings.accumulate)
            for micro in self._split_microbatches(part)
        ]
        for number, part in enumerate(parts, 1):
            mine = part[self.rank :: self.size]
            self.dropout_masks.begin_forward(batch.step, mine, self.device)
            inputs, targets = batch.load(mine)
            with nullcontext() if number == len(parts) else self.skip_gradient_sync():
                loss = compute_per_sample(
                    batch.loss, self.compute_outputs(self.training_network, inputs), targets
                ).sum()
                # Gradients are averaged over the ranks, whose shares may differ by a sample, or be empty. The scalar
                # loss has the factor, since torch imports sympy (0.4 s) if backward() gets gradients.
                self.scaler.scale(loss * (self.size / batch.size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / batch.size

    def _split_microbatches(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return divide_into_parts(part, self.settings.microbatches)

    @property
    def training_network(self) -> nn.Module:
        """The module that is called in training."""
        return self.network

    def skip_gradient_sync(self) -> AbstractContextManager[object]:
        """Return a context in which a backward pass does not average gradients over the ranks.

        Gradients are averaged only in the backward pass of the final part of a batch.
        """
        return nullcontext()

    @torch.no_grad()
    def compute_sums(  # noqa: D102
        self, load: LoadBatch, samples: int, max_samples: int, measures: Sequence[PerSampleFunction]
    ) -> torch.Tensor:
        self.network.eval()
        sums = torch.zeros(len(measures), dtype=torch.float64, device=self.device)
        for part in split_by_size(torch.arange(samples), max_samples * self.size):
            inputs, targets = load(part[self.rank :: self.size])
            sums += sum_measures(self.compute_outputs(self.network, inputs), targets, measures)
        dist.all_reduce(sums)
        return sums

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: D102
        return self.network.named_parameters()

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:  # noqa: D102
        return tensors


def sum_measures(outputs: torch.Tensor, targets: torch.Tensor, measures: Sequence[PerSampleFunction]) -> torch.Tensor:
    """Return the sum of each measure over the samples, float64 of shape (measures,)."""
    return torch.stack([compute_per_sample(measure, outputs, targets).double().sum() for measure in measures])


def compute_per_sample(measure: PerSampleFunction, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a measure (loss or metric) of each sample, shape (N,), from a network's outputs.

    Raises ValueError if the measure returns another shape. For example, means over a rank's samples cannot be added up
    over ranks.
    """
    values = measure(promote_to_float32(outputs), targets)
    if values.shape != outputs.shape[:1]:
        name = getattr(measure, "__name__", type(measure).__name__)
        raise ValueError(
            f"{name} must return a number for each sample, shape ({len(outputs)},), got shape {tuple(values.shape)}. "
            "Losses of torch do with reduction='none'"
        )
    return values


def promote_to_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Convert outputs with fewer than 32 bits to float32, since losses need this precision."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def divide_into_parts(positions: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Divide positions into at most `count` parts of equal size; the final part may be smaller."""
    return [positions] if count == 1 else split_by_size(positions, max(1, -(-len(positions) // count)))


def split_by_size(positions: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Divide positions into parts of `size`; the final part may be smaller."""
    return positions.split(size)  # type: ignore[no-any-return, no-untyped-call]
