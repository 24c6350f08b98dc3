"""Pipeline stages: each rank has some blocks of the network, and microbatches pass through all ranks.

A global batch (samples of one training step) is divided into `settings.accumulate` parts, and each part into
`settings.microbatches` microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hpo.training.parallel.dropout import replace_dropout
from hpo.training.parallel.module_tree import convert_to_channels_last
from hpo.training.parallel.stage_partition import Blocks, list_blocks, partition_stages
from hpo.training.parallel.strategy import (
    GlobalBatch,
    LoadBatch,
    ParallelStrategy,
    PerSampleFunction,
    compute_per_sample,
    divide_into_parts,
    split_by_size,
    sum_measures,
)

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker
    from hpo.training.parallel.settings import ParallelSettings


class PipelineStrategy(ParallelStrategy):
    """A network in stages (Huang et al. 2019), with the 1F1B schedule (Narayanan et al. 2019).

    In 1F1B, a rank alternates between the forward pass of one microbatch and the backward pass of another. Batch
    normalisation uses the statistics of a microbatch.
    """

    def __init__(
        self,
        network: nn.Module,
        worker: Worker,
        settings: ParallelSettings,
        stage_costs: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(worker, settings)
        if self.size > 1 and self.device.type != "cpu" and dist.get_backend() == "gloo":
            raise ValueError(
                "each rank must have its own GPU for parallel=pipeline, got ranks that share one. Start fewer ranks "
                "per host, or use parallel=replicate"
            )
        self._comm = worker.comm
        counts = worker.comm.allgather(len(worker.devices))
        parts = partition_stages(list_blocks(replace_dropout(network, self.dropout_masks)), sum(counts), stage_costs)
        parts_of_ranks = [parts[sum(counts[:rank]) : sum(counts[: rank + 1])] for rank in range(self.size)]
        stages = [[block for part in parts for block in part] for parts in parts_of_ranks]
        for stage in stages[: self.rank] + stages[self.rank + 1 :]:
            for _, block in stage:
                if not any(block is own for _, own in stages[self.rank]):
                    block.to("meta")  # This frees the memory even if the caller still holds the network.
        self._blocks = stages[self.rank]
        self._stage = _StageModule(parts_of_ranks[self.rank], worker.devices, self)
        # A separate group, since torch's check of collectives would count send and recv as collectives.
        self._group: Any = dist.new_group()
        self._boundaries: list[tuple[torch.Size, torch.dtype]] = []
        self._schedules: dict[tuple[int, int, bool], Any] = {}
        self._batch: GlobalBatch | None = None
        self.positions: deque[torch.Tensor] = deque()

    @property
    def _is_first(self) -> bool:
        return self.rank == 0

    @property
    def _is_last(self) -> bool:
        return self.rank == self.size - 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: D102
        named = ((f"{name}.{inner}", p) for name, block in self._blocks for inner, p in block.named_parameters())
        return iter({id(p): (name, p) for name, p in named}.values())  # A block may occur several times.

    def compute_gradients(self, batch: GlobalBatch) -> torch.Tensor:  # noqa: D102
        self._exchange_boundaries(batch.load)
        self._stage.train()
        self._batch = batch
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in batch.split_positions(self.settings.accumulate):
            for microbatches in self._group_microbatches(part):
                schedule, inputs, targets = self._prepare_step(batch.load, microbatches, training=True)
                losses: list[torch.Tensor] = []
                arguments = {"target": targets, "losses": losses} if self._is_last else {}
                with _unwrap_errors():
                    schedule.step(*inputs, **arguments, return_outputs=False)
                total += sum((loss.detach() for loss in losses), torch.zeros_like(total))
        return total / self.scaler.get_scale()

    @torch.no_grad()
    def compute_sums(  # noqa: D102
        self, load: LoadBatch, samples: int, max_samples: int, measures: Sequence[PerSampleFunction]
    ) -> torch.Tensor:
        self._exchange_boundaries(load)
        self._stage.eval()
        sums = torch.zeros(len(measures), dtype=torch.float64, device=self.device)
        for part in split_by_size(torch.arange(samples), max_samples * self.settings.microbatches):
            for microbatches in self._group_microbatches(part):
                schedule, inputs, targets = self._prepare_step(load, microbatches, training=False)
                with _unwrap_errors():
                    outputs = schedule.step(*inputs)
                if targets is not None and self._is_last:
                    sums += sum_measures(outputs, targets, measures)
        dist.all_reduce(sums)  # Only the last stage has computed them.
        return sums

    def compute_total_norm(self) -> torch.Tensor:  # noqa: D102
        square = super().compute_total_norm().to(self.device).square()  # The norm of a frozen stage is on the CPU.
        dist.all_reduce(square)
        return square.sqrt()

    def state_dict(self) -> Mapping[str, torch.Tensor]:  # noqa: D102
        return self.gather_tensors({name: tensor.detach() for name, tensor in _collect_state(self._blocks).items()})

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:  # noqa: D102
        metadata = self._comm.gather({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
        if metadata is None:
            for tensor in tensors.values():
                dist.send(tensor.to(self.device).contiguous(), 0, group=self._group)
            return {}
        whole = dict(tensors)
        for rank, parts in enumerate(metadata[1:], 1):
            for name, (shape, dtype) in parts.items():
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, rank, group=self._group)
                whole[name] = received.cpu()  # The memory of the leader's device may be too small for all stages.
        return whole

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        for name, block in self._blocks:
            prefix = f"{name}."
            block.load_state_dict({k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)})

    def compute_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return one microbatch's part of the mean loss of the global batch, multiplied by the scale of `scaler`."""
        assert self._batch is not None
        return self.scaler.scale(compute_per_sample(self._batch.loss, outputs, targets).sum() / self._batch.size)

    def begin_microbatch(self) -> None:
        """Prepare the dropout masks for the next microbatch on this rank's stage."""
        if self._batch is not None and self.positions:
            self.dropout_masks.begin_forward(self._batch.step, self.positions.popleft(), self.device)

    def _group_microbatches(self, part: torch.Tensor) -> list[Sequence[torch.Tensor]]:
        """Divide a part of a batch into microbatches, grouped by size, since buffers between stages have one size."""
        microbatches = divide_into_parts(part, self.settings.microbatches)
        whole = [positions for positions in microbatches if len(positions) == len(microbatches[0])]
        return [group for group in (whole, microbatches[len(whole) :]) if group]

    def _prepare_step(
        self, load: LoadBatch, microbatches: Sequence[torch.Tensor], training: bool
    ) -> tuple[Any, list[torch.Tensor], torch.Tensor | None]:
        """Return the schedule for microbatches, its inputs and the targets.

        The inputs are empty except on the first rank. The targets are None except on the first and the final rank.
        """
        self.positions = deque(microbatches if training else ())
        schedule = self._get_schedule(len(microbatches), len(microbatches[0]), training)
        if not (self._is_first or self._is_last):
            return schedule, [], None
        inputs, targets = load(torch.cat(list(microbatches)))
        return schedule, [inputs] if self._is_first else [], targets

    def _get_schedule(self, count: int, size: int, training: bool) -> Any:
        key = (count, size, training)
        if key not in self._schedules:
            before, after = (
                torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=training and index > 0)
                for index, (shape, dtype) in enumerate(self._boundaries[self.rank : self.rank + 2], self.rank)
            )
            stage = PipelineStage(
                *(self._stage, self.rank, self.size, self.device),
                input_args=(before,),
                output_args=(after,),
                group=self._group,
            )
            # 1F1B needs at least as many microbatches as stages. With fewer, GPipe computes all forward passes first.
            kind = Schedule1F1B if training and count >= self.size else ScheduleGPipe
            self._schedules[key] = kind(stage, count, self.compute_loss if training else None, scale_grads=False)
        return self._schedules[key]

    @torch.no_grad()
    def _exchange_boundaries(self, load: LoadBatch) -> None:
        """Find the shapes and types of tensors between stages: pass one sample through the stages of all ranks."""
        if self._boundaries:
            return
        self._stage.eval()
        inputs, _ = load(torch.zeros(1, dtype=torch.int64))
        boundary = (inputs.shape[1:], inputs.dtype)
        self._boundaries.append(boundary)
        for rank in range(self.size):
            if rank == self.rank:
                shape, dtype = boundary
                output = self._stage(inputs if rank == 0 else torch.zeros(1, *shape, dtype=dtype, device=self.device))
                boundary = (output.shape[1:], output.dtype)
            boundary = self._comm.bcast(boundary, root=rank)
            self._boundaries.append(boundary)


class _StageModule(nn.Module):
    """The blocks of one rank in sequence, on one or more devices."""

    def __init__(self, parts: Sequence[Blocks], devices: Sequence[torch.device], strategy: PipelineStrategy) -> None:
        super().__init__()
        self._devices = devices
        self._strategy = strategy
        self._parts = nn.ModuleList(
            convert_to_channels_last(nn.Sequential(*(block for _, block in part)).to(device))
            for part, device in zip(parts, devices, strict=True)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._strategy.begin_microbatch()
        for part, device in zip(self._parts, self._devices, strict=True):
            inputs = self._strategy.compute_outputs(part, inputs.to(device))
        return inputs.to(self._devices[0]).contiguous()  # Tensors must be contiguous to be sent.


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise the exception of a block instead of torch's RuntimeError, which only reports that a stage failed."""
    cause = None
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None or "ailed to run" not in str(error):  # torch's messages are "Failed to run forward" and so on.
            raise
    if cause is not None:  # Outside the except block, its context is not torch's error, which holds frames.
        raise cause


def _collect_state(blocks: Blocks) -> dict[str, torch.Tensor]:
    return {f"{name}.{inner}": t for name, block in blocks for inner, t in block.state_dict().items()}
