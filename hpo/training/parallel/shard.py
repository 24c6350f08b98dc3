"""Shards: each rank has a part of each parameter, and gathers the parameters of a block to compute it (FSDP2)."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hpo.training.parallel.batch_norm import replace_batch_norm
from hpo.training.parallel.dropout import replace_dropout
from hpo.training.parallel.module_tree import find_shard_units
from hpo.training.parallel.precision import DTYPES
from hpo.training.parallel.strategy import DataParallelStrategy

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker
    from hpo.training.parallel.settings import ParallelSettings

_mesh_numbers = itertools.count()
_mesh_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class ShardStrategy(DataParallelStrategy):
    """A network whose parameters, gradients and optimizer state are split over the ranks (Rajbhandari et al. 2020)."""

    def __init__(self, network: nn.Module, worker: Worker, settings: ParallelSettings) -> None:
        super().__init__(worker, settings)
        if isinstance(network, FSDPModule):
            raise ValueError("the network must not be sharded, got an FSDPModule. Make a new one in each evaluation")
        network = replace_batch_norm(replace_dropout(network, self.dropout_masks))
        mesh = _make_mesh(self.device)
        mixed = settings.precision != "float32"
        whole = MixedPrecisionPolicy(cast_forward_inputs=False)
        # Gradients are reduced in float32, since a sum over ranks in 16 bits would lose precision.
        half = MixedPrecisionPolicy(DTYPES[settings.precision], torch.float32, cast_forward_inputs=False)
        # A block moves to the device when it is sharded, so that the device holds at most one whole block.
        for block in [*_find_independent_blocks(find_shard_units(network)), network]:
            # Under autocast, the kernels of norms require parameters in float32.
            norms = _find_norms(block) if mixed else []
            if norms and block not in norms:
                fully_shard(norms, mesh=mesh, mp_policy=whole)
            fully_shard(block, mesh=mesh, mp_policy=half if mixed and block not in norms else whole)
        self.network = network.train()

    def compute_total_norm(self) -> torch.Tensor:  # noqa: D102
        norm = super().compute_total_norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def state_dict(self) -> Mapping[str, torch.Tensor]:  # noqa: D102
        return self.gather_tensors(self.network.state_dict())

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:  # noqa: D102
        whole = {}
        for name, tensor in tensors.items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = gathered.cpu()  # The memory of the device may be too small for all of them.
        return whole

    def select_shard(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:  # noqa: D102
        if not isinstance(parameter, DTensor):
            return tensor
        on_device = tensor.to(self.device)  # All ranks have the tensor, so none has to send it.
        return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        set_model_state_dict(self.network, dict(state), options=StateDictOptions(full_state_dict=True))


def _find_independent_blocks(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another block.

    All other blocks are sharded together with the network.
    """
    owners = Counter(p for block in blocks for p in block.parameters())
    return [block for block in blocks if all(owners[p] == 1 for p in block.parameters())]


def _find_norms(module: nn.Module) -> list[nn.Module]:
    """Return the norms of a module that are not sharded yet: modules whose parameters are all vectors."""
    own = ((inner, list(inner.parameters(recurse=False))) for inner in module.modules())
    return [inner for inner, ps in own if ps and all(p.dim() == 1 for p in ps) and not isinstance(inner, FSDPModule)]


def _make_mesh(device: torch.device) -> DeviceMesh:
    """Return a mesh of the worker's ranks with a name that is unique to the process group.

    torch treats meshes of the same name and ranks as equal, and caches shardings by mesh. With equal names, a new
    process group would get a cached mesh of an earlier process group, which has been destroyed.
    """
    group = dist.group.WORLD
    assert group is not None
    name = _mesh_names.setdefault(group, f"ranks_{next(_mesh_numbers)}")
    mesh = init_device_mesh(device.type, (group.size(),), mesh_dim_names=(name,))
    # torch's caches never release meshes, and a mesh holds its group, with connections and threads, for use by the
    # compiler (torch 2.15). Without this entry, torch finds the group by its name.
    getattr(mesh, "_pg_registry", {}).clear()
    return mesh
