"""What the ways to share a network have in common: gradients of a global batch, evaluation, one whole state dict."""

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

# Returns the inputs and the targets of a batch's samples at some positions, int64 of shape (N,) on the CPU.
LoadBatch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Returns a number for each sample, shape (N,), from a network's outputs and the targets: a loss, or a metric.
PerSampleFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GlobalBatch:
    """A global batch of a training step: its samples are at the positions 0 to `size` - 1, `loss` is each one's."""

    def __init__(self, load: LoadBatch, size: int, step: int, loss: PerSampleFunction) -> None:
        self.load = load
        self.size = size
        self.step = step
        self.loss = loss

    def split_positions(self, count: int) -> Sequence[torch.Tensor]:
        """Return the positions in this many parts of one size, of which the last may have less."""
        return divide_into_parts(torch.arange(self.size), count)


class ParallelStrategy(ABC):
    """A network that a worker's ranks share; made by all of them together, as all calls are.

    Losses are means over a global batch, and gradients those of a single process that has all of it, however the ranks
    share it.
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
        """Return this rank's parameters, or its parts of them, by their names in the whole network."""

    @abstractmethod
    def compute_gradients(self, batch: GlobalBatch) -> torch.Tensor:
        """Add the gradients of a batch's mean loss, times the scaler's factor, to this rank's parameters.

        Returns this rank's part of the loss: the sum over all ranks is the loss.
        """

    @abstractmethod
    def compute_sums(
        self, load: LoadBatch, samples: int, max_samples: int, measures: Sequence[PerSampleFunction]
    ) -> torch.Tensor:
        """Return the sum of each measure over so many samples, float64, the same on all ranks.

        The network computes at most `most` samples on a rank at a time, without gradients.
        """

    @abstractmethod
    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the whole network's state dict on the leader; what other ranks get is of no use."""

    @abstractmethod
    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return, on the leader, tensors of the whole network by their names, of which this rank has its parts."""

    def select_shard(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - for shards
        """Return this rank's part of a tensor that is whole, and belongs to one of its parameters."""
        return tensor

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a whole network's state dict, which each rank has, to go on with it or to start from it."""

    def compute_total_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the gradients of all parameters of the network."""
        return get_total_norm([p.grad for _, p in self.named_parameters() if p.grad is not None])

    def compute_outputs(self, network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Return what a network computes in the precision that was asked for."""
        with make_autocast(self.settings.precision, self.device):
            return network(inputs)  # type: ignore[no-any-return]


class DataParallelStrategy(ParallelStrategy):
    """A way in which each rank computes its share of each batch with the whole network."""

    network: nn.Module  # begins in training mode, all of it

    def compute_gradients(self, batch: GlobalBatch) -> torch.Tensor:  # noqa: D102 - as above
        if not self.network.training:  # it goes through all modules, which takes 1% of a small network's step
            self.network.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # A worker of one rank has no stages, and computes microbatches as parts.
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
                # Gradients are averaged over the ranks, whose shares may differ by a sample, or be empty. (Of a number:
                # where backward() is given gradients, torch imports sympy, which takes 0.4 s.)
                self.scaler.scale(loss * (self.size / batch.size)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / batch.size

    def _split_microbatches(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return divide_into_parts(part, self.settings.microbatches)

    @property
    def training_network(self) -> nn.Module:
        """The network as it is called in training."""
        return self.network

    def skip_gradient_sync(self) -> AbstractContextManager[object]:
        """Return a context for a part of a batch that is not its last; gradients need not be averaged in it."""
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
    """Return the sum of each measure over the samples, float64."""
    return torch.stack([compute_per_sample(measure, outputs, targets).double().sum() for measure in measures])


def compute_per_sample(measure: PerSampleFunction, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a measure of each sample, shape (N,), from a network's outputs.

    Raises ValueError where the measure has another shape: of a mean, the sum over samples would be another loss.
    """
    values = measure(promote_to_float32(outputs), targets)
    if values.shape != outputs.shape[:1]:
        name = getattr(measure, "__name__", type(measure).__name__)
        raise ValueError(
            f"{name} returned a tensor of shape {tuple(values.shape)} for {len(outputs)} samples: a loss or a metric "
            f"has a number for each, shape ({len(outputs)},), as torch's losses have with reduction='none'"
        )
    return values


def promote_to_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs with 32 bits at least, as losses need them."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def divide_into_parts(positions: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Return positions in this many parts of one size, of which the last may have less, or in fewer."""
    return [positions] if count == 1 else split_by_size(positions, max(1, -(-len(positions) // count)))


def split_by_size(positions: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Return positions in parts of this size, of which the last may have less."""
    return positions.split(size)  # type: ignore[no-any-return, no-untyped-call]
