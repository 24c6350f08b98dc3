"""Pipeline stages over torch.distributed.pipelining, for batches of any size.

torch's stages need microbatches of one size, whose shapes are known, and a network that a user has
cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hpo.training.shared_layers import DropoutMasks, convert_to_channels_last, list_children
from hpo.training.sharing import StagedModel, make_autocast

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

Blocks = list[tuple[str, nn.Module]]


class Pipeline(StagedModel):
    """A network in stages (Huang et al. 2019), through which microbatches pass.

    Each rank has some of the blocks.

    The network is cut in place: it keeps this rank's blocks, which keep their names. A rank with
    several GPUs has a stage on each. Batch normalisation uses the statistics of a microbatch.
    Collective: call the constructor and all methods on all ranks.

    Args:
        network: The network, in memory of the CPU. Its blocks are its children, and those of nested
            nn.Sequentials.
        worker: The worker that the objective gets.
        masks: The masks of the network's dropout layers.
        microbatches: The number of microbatches into which `backward` divides its samples.
        precision: The type for autocast: "float32", "bfloat16" or "float16".
        stage_costs: Costs of the blocks by name, in any unit. Blocks without an entry cost 0. By
            default, the cost of a block is its number of parameters.

    Raises:
        ValueError: The network cannot be cut into as many stages, or ranks share a GPU.
    """

    def __init__(
        self,
        network: nn.Sequential,
        worker: Worker,
        masks: DropoutMasks,
        microbatches: int = 1,
        *,
        precision: str = "float32",
        stage_costs: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if worker.size > 1 and worker.device.type != "cpu" and dist.get_backend() == "gloo":
            raise ValueError(
                "each rank must have its own GPU for parallel=pipeline, got ranks that share one. "
                "Start fewer ranks per host, or use parallel=replicate"
            )
        self.stage = _Stage(network, worker, masks, precision)
        self.worker = worker
        self._microbatches = microbatches
        counts = worker.comm.allgather(len(worker.devices))
        parts = partition_stages(list_blocks(network), sum(counts), stage_costs)
        first = sum(counts[: self.worker.rank])
        self.stage.keep_parts(parts[first : first + counts[self.worker.rank]])
        # A separate group, since torch's check of collectives would count send and recv as
        # collectives.
        self._group: Any = dist.new_group()
        self._boundaries: list[tuple[torch.Size, torch.dtype]] = []
        self._schedules: dict[tuple[int, int, bool], Any] = {}
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def backward(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        step: int,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Add the gradients of the sum of `loss` over all microbatches.

        Args:
            inputs: Inputs of the network, shape (N, ...); used on the first rank.
            targets: Targets, shape (N, ...); used on the final rank.
            positions: Positions of the samples in the global batch, for dropout.
            step: The index of the training step, for dropout.
            loss: A function from the outputs and targets of a microbatch to a scalar.
        """
        self._loss = loss
        for start, count, size in self._plan_microbatches(len(positions)):
            chosen = slice(start, start + count * size)
            self.stage.microbatches = deque(
                (step, part) for part in torch.split(positions[chosen], size)
            )
            schedule = self._get_schedule(inputs, count, size)
            first_inputs = [inputs[chosen]] if self.worker.rank == 0 else []
            target = {"target": targets[chosen]} if self.worker.rank == self.worker.size - 1 else {}
            with _unwrap_errors():
                schedule.step(*first_inputs, **target, return_outputs=False)
        self._loss = None

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the whole network on all ranks, without gradients."""
        parts = []
        for start, count, size in self._plan_microbatches(len(inputs)):
            schedule = self._get_schedule(inputs, count, size)
            with _unwrap_errors():
                part = schedule.step(
                    *([inputs[start : start + count * size]] if self.worker.rank == 0 else [])
                )
            if part is None:
                shape, dtype = self._boundaries[-1]
                part = torch.empty(count * size, *shape, dtype=dtype, device=self.worker.device)
            parts.append(part)
        outputs = torch.cat(parts)
        dist.broadcast(outputs, self.worker.size - 1, group=self._group)
        return outputs

    def gather_tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of all ranks by name, on the leader. Collective: call on all ranks.

        The leader receives one tensor at a time, since its memory may be too small for several
        copies.
        """
        own = {
            name: value.detach()
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }
        others = {name: value for name, value in tensors.items() if name not in own}
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        stages = self.worker.comm.gather((shapes, others))
        if stages is None:
            for tensor in own.values():
                dist.send(tensor.to(self.worker.device).contiguous(), 0, group=self._group)
            return {}
        whole = {**others, **{name: tensor.cpu() for name, tensor in own.items()}}
        for rank, (shapes, others) in enumerate(stages[1:], 1):
            whole |= others
            for name, (shape, dtype) in shapes.items():
                received = torch.empty(shape, dtype=dtype, device=self.worker.device)
                dist.recv(received, rank, group=self._group)
                whole[name] = received.cpu()
        return whole

    def _plan_microbatches(self, samples: int) -> list[tuple[int, int, int]]:
        """Return the start, the number and the size of groups of equal microbatches.

        Buffers between stages have one size, so a smaller final microbatch is a group of its own.
        """
        size = max(1, -(-samples // self._microbatches))
        count, rest = divmod(samples, size)
        return [(0, count, size)] * bool(count) + [(count * size, 1, rest)] * bool(rest)

    def _get_schedule(self, inputs: torch.Tensor, count: int, size: int) -> Any:
        rank, key = self.worker.rank, (count, size, self.training)
        if not self._boundaries:
            self._exchange_boundaries(inputs)
        if key not in self._schedules:
            before, after = (
                torch.empty(
                    size,
                    *shape,
                    dtype=dtype,
                    device="meta",
                    requires_grad=self.training and index > 0,
                )
                for index, (shape, dtype) in enumerate(
                    self._boundaries[self.worker.rank : self.worker.rank + 2], self.worker.rank
                )
            )
            stage = PipelineStage(
                *(self.stage, rank, self.worker.size, self.worker.device),
                input_args=(before,),
                output_args=(after,),
                group=self._group,
            )
            # 1F1B (Narayanan et al. 2019) needs at least as many microbatches as stages. With
            # fewer, GPipe computes all forward passes first.
            kind = Schedule1F1B if self.training and count >= self.worker.size else ScheduleGPipe
            self._schedules[key] = kind(
                stage, count, self._compute_loss if self.training else None, scale_grads=False
            )
        return self._schedules[key]

    def _compute_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)

    @torch.no_grad()
    def _exchange_boundaries(self, inputs: torch.Tensor) -> None:
        """Pass a sample through all stages, to find shapes and types between them."""
        was_training = self.training
        self.eval()
        boundary = (inputs.shape[1:], inputs.dtype)
        self._boundaries.append(boundary)
        for rank in range(self.worker.size):
            if rank == self.worker.rank:
                shape, dtype = boundary
                output = self.stage(torch.zeros(1, *shape, dtype=dtype, device=self.worker.device))
                boundary = (output.shape[1:], output.dtype)
            boundary = self.worker.comm.bcast(boundary, root=rank)
            self._boundaries.append(boundary)
        self.train(was_training)


class _Stage(nn.Module):
    """The blocks of one rank, on one or more devices."""

    def __init__(
        self, network: nn.Sequential, worker: Worker, masks: DropoutMasks, precision: str
    ) -> None:
        super().__init__()
        self.network = network
        self.microbatches: deque[tuple[int, torch.Tensor]] = deque()
        self._devices = worker.devices
        self._masks = masks
        self._precision = precision

    def keep_parts(self, parts: Sequence[Blocks]) -> None:
        """Remove the other blocks from the network, and move each part to its device."""
        kept = {name for part in parts for name, _ in part}
        for name, _ in list_blocks(self.network):
            if name not in kept:
                parent, _, child = name.rpartition(".")
                delattr(self.network.get_submodule(parent), child)
        for part, device in zip(parts, self._devices, strict=True):
            for _, block in part:
                convert_to_channels_last(block.to(device))
        self.parts = parts

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            step, positions = self.microbatches.popleft()
            self._masks.begin_forward(step, positions, self._devices[0])
        with make_autocast(self._precision, self._devices[0]):
            for part, device in zip(self.parts, self._devices, strict=True):
                inputs = inputs.to(device)
                for _, block in part:
                    inputs = block(inputs)
        return inputs.to(self._devices[0]).contiguous()  # Tensors must be contiguous to be sent.


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise the exception of a block, not torch's, which only reports a failed stage."""
    cause = None
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        # Torch's messages are "Failed to run forward" and so on.
        if cause is None or "ailed to run" not in str(error):
            raise
    # Outside the except block, its context is not torch's error, which holds frames.
    if cause is not None:
        raise cause


def list_blocks(network: nn.Module) -> Blocks:
    """Return a network's blocks with their names, in the order of computation.

    The blocks of an nn.Sequential are its children, and recursively the children of nested
    nn.Sequentials. Raises ValueError for any other network, since its order of computation is
    unknown.
    """
    if type(network) is not nn.Sequential:
        raise ValueError(
            "the network must be an nn.Sequential for parallel=pipeline, got "
            f"{type(network).__name__}. Make it an nn.Sequential of its layers, or use "
            "parallel=shard"
        )
    return list(_iterate_blocks(network, ""))


def _iterate_blocks(sequence: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in list_children(sequence):
        if type(child) is nn.Sequential:
            yield from _iterate_blocks(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def partition_stages(
    blocks: Blocks, count: int, stage_costs: Mapping[str, float] | None = None
) -> list[Blocks]:
    """Divide the blocks into `count` stages, with the largest cost as small as possible.

    The cost of a block is its entry in `stage_costs`, or by default its number of parameters.
    Raises ValueError if the network has too few blocks with parameters, if `stage_costs` names
    unknown blocks, or if stages share parameters.
    """
    units = _group_blocks(blocks)
    if len(units) < count:
        raise ValueError(
            f"the network must have at least {count} blocks with parameters for parallel=pipeline, "
            f"one for each rank or GPU, got {len(units)}. Set --ranks-per-worker to at most "
            f"{len(units)}, or use parallel=shard"
        )
    unknown = [name for name in stage_costs or () if all(name != block for block, _ in blocks)]
    if unknown:
        names = ", ".join(name for name, _ in blocks)
        raise ValueError(f"stage_costs must be for the blocks {names}, got {unknown[0]}")
    ends = _balance_costs(
        [sum(_get_cost(name, block, stage_costs) for name, block in unit) for unit in units], count
    )
    stages = [
        [block for unit in units[start:end] for block in unit]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    _check_no_shared_parameters(stages)
    return stages


def _group_blocks(blocks: Blocks) -> list[Blocks]:
    """Divide the blocks into groups, each with exactly one block that has parameters.

    A block without parameters belongs to the group of the previous block, or to the first group.
    """
    units: list[Blocks] = []
    for name, block in blocks:
        if not units or (
            _count_parameters(block) and any(_count_parameters(other) for _, other in units[-1])
        ):
            units.append([])
        units[-1].append((name, block))
    return [unit for unit in units if any(_count_parameters(block) for _, block in unit)]


def _count_parameters(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters())


def _get_cost(name: str, block: nn.Module, costs: Mapping[str, float] | None) -> float:
    return _count_parameters(block) if costs is None else costs.get(name, 0.0)


def _balance_costs(costs: Sequence[float], count: int) -> list[int]:
    """Divide a sequence of costs into `count` parts, and return the end index of each part.

    The largest sum of a part is as small as possible.
    """

    @cache
    def find_best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sum(costs[:end]), (end,)
        candidates = ((start, find_best(start, parts - 1)) for start in range(parts - 1, end))
        return min(
            (max(worst, sum(costs[start:end])), (*ends, end)) for start, (worst, ends) in candidates
        )

    return list(find_best(len(costs), count)[1])


def _check_no_shared_parameters(stages: Sequence[Blocks]) -> None:
    owners: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, block in stage:
            for inner, parameter in block.named_parameters():
                if owners.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        "stages must not share parameters for parallel=pipeline, got "
                        f"{name}.{inner} in two stages. Give each stage its own parameter, or use "
                        "parallel=shard"
                    )
