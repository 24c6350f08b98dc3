"""Pipeline stages over torch.distributed.pipelining, for batches of any size.

torch's stages need microbatches of one size, whose shapes are known, and a network that a user has
cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hpo.training.shared_layers import SharedDropout, convert_to_channels_last, list_children

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

Blocks = list[tuple[str, nn.Module]]


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Make a context in which torch uses a precision for all operations for which it is safe.

    Args:
        precision: "float32", "bfloat16" or "float16".
        device: The device that computes.
    """
    if precision == "float32":
        return nullcontext()
    # A cache would keep the cast weights of a sharded block, and mix the graphs of microbatches.
    return torch.autocast(device.type, getattr(torch, precision), cache_enabled=False)


class Pipeline(nn.Module):
    """A network in stages (Huang et al. 2019), through which microbatches pass.

    The network is cut in place: each rank keeps some of the blocks, under their names. A rank with
    several GPUs has a stage on each. Batch normalisation uses the statistics of a microbatch.
    Collective: call the constructor and all methods on all ranks.

    Args:
        network: The network, in memory of the CPU. Its blocks are its children, and those of nested
            nn.Sequentials. For dropout, call `replace_dropout` first.
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
        self.worker = worker
        self._microbatches = microbatches
        counts = worker.comm.allgather(len(worker.devices))
        stages = partition_stages(list_blocks(network), sum(counts), stage_costs)
        first = sum(counts[: worker.rank])
        self.stage = _Stage(
            network, stages[first : first + counts[worker.rank]], worker.devices, precision
        )
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
        for chosen, size in self._plan_microbatches(len(positions)):
            parts = positions[chosen].split(size)  # type: ignore[no-untyped-call]
            self.stage.microbatches = deque((step, part) for part in parts)
            if self.worker.rank == self.worker.size - 1:
                self._run_stages(inputs, chosen, size, target=targets[chosen])
            else:
                self._run_stages(inputs, chosen, size)
        self._loss = None

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the whole network on all ranks, without gradients."""
        parts = []
        for chosen, size in self._plan_microbatches(len(inputs)):
            part = self._run_stages(inputs, chosen, size)
            if part is None:
                shape, dtype = self._boundaries[-1]
                samples = chosen.stop - chosen.start
                part = torch.empty(samples, *shape, dtype=dtype, device=self.worker.device)
            parts.append(part)
        outputs = torch.cat(parts)
        dist.broadcast(outputs, self.worker.size - 1, group=self._group)
        return outputs

    def gather_tensors(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all ranks by name, on the leader. Collective: call on all ranks.

        Tensors are sent one at a time, since the leader's memory may be too small for several
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

    def _plan_microbatches(self, samples: int) -> list[tuple[slice, int]]:
        """Return groups of samples, and the size of the equal microbatches of each group.

        Buffers between stages have one size, so a smaller final microbatch is a group of its own.
        """
        size = max(1, -(-samples // self._microbatches))
        end = samples - samples % size
        groups = [(slice(0, end), size), (slice(end, samples), samples - end)]
        return [(chosen, size) for chosen, size in groups if chosen.start < chosen.stop]

    def _run_stages(self, inputs: torch.Tensor, chosen: slice, size: int, **target: Any) -> Any:
        """Pass a group of microbatches through all stages. Return the outputs on the final rank."""
        if not self._boundaries:
            self._find_boundaries(inputs)
        count = (chosen.stop - chosen.start) // size
        key = (count, size, self.training)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(count, size)
        first_inputs = [inputs[chosen]] if self.worker.rank == 0 else []
        with _unwrap_errors():
            return self._schedules[key].step(
                *first_inputs, **target, return_outputs=not self.training
            )

    @torch.no_grad()
    def _find_boundaries(self, inputs: torch.Tensor) -> None:
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

    def _make_schedule(self, count: int, size: int) -> Any:
        # It imports torch's compiler, which takes 1.5 s of CPU time, as do optimizers.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        rank = self.worker.rank
        before, after = (
            torch.empty(size, *shape, dtype=dtype, device="meta")
            for shape, dtype in self._boundaries[rank : rank + 2]
        )
        before.requires_grad_(self.training and rank > 0)
        after.requires_grad_(self.training)
        stage = PipelineStage(
            self.stage,
            rank,
            self.worker.size,
            self.worker.device,
            input_args=(before,),
            output_args=(after,),
            group=self._group,
        )
        # 1F1B (Narayanan et al. 2019) needs at least as many microbatches as stages. With fewer,
        # GPipe computes all forward passes first.
        kind = Schedule1F1B if self.training and count >= self.worker.size else ScheduleGPipe
        loss = self._compute_loss if self.training else None
        return kind(stage, count, loss, scale_grads=False)

    def _compute_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)


class _Stage(nn.Module):
    """The blocks of one rank, on one or more devices. The other blocks leave the network."""

    def __init__(
        self,
        network: nn.Sequential,
        parts: Sequence[Blocks],
        devices: Sequence[torch.device],
        precision: str,
    ) -> None:
        super().__init__()
        self.network = network
        self.parts = parts
        self.microbatches: deque[tuple[int, torch.Tensor]] = deque()
        self._devices = devices
        self._precision = precision
        layers = [module for module in network.modules() if isinstance(module, SharedDropout)]
        self._masks = layers[0].masks if layers else None
        kept = {name for part in parts for name, _ in part}
        for name, _ in list_blocks(network):
            if name not in kept:
                parent, _, child = name.rpartition(".")
                delattr(network.get_submodule(parent), child)
        for part, device in zip(parts, devices, strict=True):
            for _, block in part:
                convert_to_channels_last(block.to(device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            step, positions = self.microbatches.popleft()
            if self._masks is not None:
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
    blocks: Blocks = []
    for name, child in list_children(network):
        if type(child) is nn.Sequential:
            blocks += [(f"{name}.{inner}", block) for inner, block in list_blocks(child)]
        else:
            blocks.append((name, child))
    return blocks


def partition_stages(
    blocks: Blocks, count: int, stage_costs: Mapping[str, float] | None = None
) -> list[Blocks]:
    """Divide the blocks into `count` stages, with the largest cost as small as possible.

    The cost of a block is its entry in `stage_costs`, or by default its number of parameters.
    Raises ValueError if the network has too few blocks with parameters, if `stage_costs` names
    unknown blocks, or if stages share parameters.
    """
    sizes = {name: sum(p.numel() for p in block.parameters()) for name, block in blocks}
    # Groups of blocks, each with one block that has parameters: a block without parameters belongs
    # to the group of the previous block, or to the first group.
    units: list[Blocks] = [[]]
    for name, block in blocks:
        if sizes[name] and any(sizes[other] for other, _ in units[-1]):
            units.append([])
        units[-1].append((name, block))
    if (found := sum(map(bool, sizes.values()))) < count:
        raise ValueError(
            f"the network must have at least {count} blocks with parameters for parallel=pipeline, "
            f"one for each rank or GPU, got {found}. Set --ranks-per-worker to at most {found}, or "
            "use parallel=shard"
        )
    if unknown := [name for name in stage_costs or () if name not in sizes]:
        raise ValueError(f"stage_costs must be for the blocks {', '.join(sizes)}, got {unknown[0]}")
    by_block = sizes if stage_costs is None else stage_costs
    ends = _balance_costs(
        [sum(by_block.get(name, 0.0) for name, _ in unit) for unit in units], count
    )
    stages = [
        [block for unit in units[start:end] for block in unit]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
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
    return stages


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
