"""Share the training of a network among ranks, in ways in which users of torch make mistakes.

`model` is a DistributedDataParallel, a network after `fully_shard`, or a `Pipeline`.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hpo.training.loop import check_choice, check_positive
from hpo.training.pipeline import Pipeline

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpo.trainer.worker import Worker

_mesh_numbers = itertools.count()
_mesh_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ParallelSettings:
    """Settings that select how the ranks of a worker share the training of a network.

    The ``Settings`` of a search file may inherit from this class, so that ``--set parallel=shard``
    works. A value that is not allowed raises a ValueError.

    Example:
        ::

            @dataclass(frozen=True)
            class Settings(ParallelSettings):
                epochs: int = 10
    """

    parallel: str = "replicate"
    """The strategy, "replicate" (DDP), "shard" (FSDP2) or "pipeline"."""
    precision: str = "float32"
    """The type of most computations, "float32", "bfloat16" or "float16". Parameters are float32."""
    accumulate: int = 1
    """The number of parts of a global batch, computed one after the other to save memory."""
    microbatches: int = 1
    """The number of microbatches of each part in a pipeline. With 1, one stage works at a time."""

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, ("replicate", "shard", "pipeline"))
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_positive(self, "accumulate", "microbatches")
        if self.microbatches > 1 and self.parallel != "pipeline":
            raise ValueError(
                f"microbatches must be 1 unless parallel=pipeline, got {self.microbatches}"
            )


def make_mesh(worker: Worker) -> DeviceMesh:
    """Make a mesh of the worker's ranks, for `fully_shard`. Collective: call on all ranks.

    Its name is unique to the process group. torch treats meshes of the same name and ranks as
    equal, and caches shardings by mesh. With equal names, a new process group would get a cached
    mesh of an earlier process group, which has been destroyed.
    """
    from torch.distributed.device_mesh import init_device_mesh

    group = dist.group.WORLD
    assert group is not None
    name = _mesh_names.setdefault(group, f"ranks_{next(_mesh_numbers)}")
    mesh = init_device_mesh(worker.device.type, (worker.size,), mesh_dim_names=(name,))
    # torch's caches never release meshes, and a mesh holds its group, with connections and threads,
    # for use by the compiler (torch 2.15). Without this entry, torch finds the group by its name.
    getattr(mesh, "_pg_registry", {}).clear()
    return mesh


def split_batch(samples: int, worker: Worker, settings: ParallelSettings) -> Iterator[torch.Tensor]:
    """Yield the positions in a global batch that this rank computes, for each of its parts.

    There are `settings.accumulate` parts, or fewer if the batch is small. The ranks share the
    samples of a part, except in a pipeline, whose ranks all take part in computing each sample.
    """
    size = math.ceil(samples / settings.accumulate)
    for part in torch.arange(samples).split(size):  # type: ignore[no-untyped-call]
        yield part if settings.parallel == "pipeline" else part[worker.rank :: worker.size]


class SharedGradScaler(GradScaler):
    """A GradScaler for float16 (Micikevicius et al. 2018) with which all ranks skip the same steps.

    torch's GradScaler looks for overflows only in a rank's own gradients. If ranks have different
    parameters, they would skip different steps, and use different scales afterwards.

    Args:
        device: The device that computes.
        precision: The scaler is disabled unless it is "float16".
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        # torch begins with 2 ** 16 and skips steps until the scale fits. Short trainings have too
        # few steps for this.
        super().__init__(
            device.type, init_scale=2.0**10, growth_interval=500, enabled=precision == "float16"
        )
        # The first call initialises the scale. Only the last stage of a pipeline would make it
        # later.
        self.scale(torch.zeros((), device=device))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        del allow_fp16
        gradients: dict[torch.device, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    gradients.setdefault(own.device, []).append(own)
        found = found_inf.clone()
        for device, on_device in gradients.items():
            here = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(
                [gradient for gradient in on_device if gradient.numel()],
                here,
                inv_scale.to(device),
            )
            found = torch.maximum(found, here.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {found.device: found}


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale gradients down to a maximum norm of the whole network. Collective: call on all ranks.

    `torch.nn.utils.clip_grad_norm_` takes a stage of a pipeline for the whole network.

    Args:
        model: The model.
        max_norm: The maximum Euclidean norm of the gradients of all parameters.
    """
    norm: Any = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if isinstance(model, Pipeline):
        square = norm.to(model.worker.device).square()  # The norm of a frozen stage is on the CPU.
        dist.all_reduce(square)
        norm = square.sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, norm)


def gather_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the whole network, for `worker.offer_weights`. Collective.

    It is complete only on the leader, in the memory of the CPU.
    """
    return _gather_tensors(model, _find_network(model).state_dict())


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of the whole network and its optimizer. Collective.

    It is complete only on the leader. Its format does not depend on the number of ranks, and on
    whether they have replicas, shards or stages.
    """
    # First, since it reshards the parameters that a forward pass has gathered. The optimizer knows
    # only the shards.
    weights = gather_weights(model)
    tensors = {
        f"{key}:{name}": tensor
        for name, parameter in _find_network(model).named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
        if tensor is not None
    }
    return {"network": weights, "optimizer": _gather_tensors(model, tensors)}


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load a state from `gather_state`, which is whole on each rank.

    The optimizer keeps its settings.
    """
    network = _find_network(model)
    network.load_state_dict(
        {name: _shard(own, state["network"][name]) for name, own in network.state_dict().items()}
    )
    tensors: dict[str, dict[str, Any]] = {}
    for entry, tensor in state["optimizer"].items():
        key, _, name = entry.partition(":")
        tensors.setdefault(name, {})[key] = tensor
    names = {parameter: name for name, parameter in network.named_parameters()}
    own_state = {
        index: {key: _shard(p, value) for key, value in tensors.get(names[p], {}).items()}
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own_state})


def _find_network(model: nn.Module) -> nn.Module:
    """Return the network of a model, with this rank's shards or stage."""
    if isinstance(model, DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model.stage.network if isinstance(model, Pipeline) else model


def _gather_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return whole tensors by their names, on the leader. Collective: call on all ranks.

    Values that are not tensors, as in the state of some optimizers, stay as they are.
    """
    if isinstance(model, Pipeline):
        return model.gather_tensors(tensors)
    whole = {}
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if dist.get_rank() == 0:  # The memory of the device may be too small for all.
            is_tensor = isinstance(gathered, torch.Tensor)
            whole[name] = gathered.detach().cpu() if is_tensor else gathered
    return whole


def _shard(own: torch.Tensor, tensor: Any) -> Any:
    """Return this rank's shard of a whole tensor, if its `own` tensor is sharded.

    Scalars, such as the number of steps, are not sharded.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or not isinstance(tensor, torch.Tensor) or not tensor.dim():
        return tensor
    # All ranks have the tensor, so none has to send it.
    on_device = tensor.to(own.to_local().device)
    return distribute_tensor(on_device, own.device_mesh, own.placements, src_data_rank=None)
