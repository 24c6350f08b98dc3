"""What an objective sees of the ranks that evaluate one individual together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hpo.ranks.communicator import SleepingComm

_SHARDED = (
    "worker.offer takes whole tensors, and {name!r} is sharded: offer, on all ranks, get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
)


@dataclass(eq=False, repr=False)
class Worker:
    """The ranks that evaluate one individual together, as an objective sees them; made anew for each evaluation.

    While an objective runs, torch.distributed's default process group spans exactly these ranks. A rank that has waited
    for its peers in a collective for `--collective-timeout` raises an error.

    ::

        def objective(params, worker):
            loss = train(params, worker.data, worker.device, share=(worker.rank, worker.size))
            torch.distributed.all_reduce(loss)  # over the worker's ranks
            return loss.item() / worker.size
    """

    rank: int
    """This rank's number in the worker, from 0; rank 0 is the leader."""
    size: int
    """The number of ranks in the worker."""
    device: torch.device
    """The `torch.device` that this rank computes on."""
    seed: int
    """The seed for weights and the order of samples: the run's, or another one where an individual is confirmed."""
    comm: SleepingComm
    """An MPI communicator of the worker's ranks, for objectives."""
    index: int
    """The worker's number in the run, from 0."""

    _data: Callable[[], Any]
    _offer: Callable[[Mapping[str, torch.Tensor]], object]

    @cached_property
    def data(self) -> Any:
        """What the search space's `prepare` returned, unchanged by other evaluations; None without a `prepare`."""
        return self._data()

    def offer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Offer the network's weights, as its `state_dict()`, before yielding or returning the loss that they have.

        The weights of the run's best individual are kept in RUN_DIR/best.safetensors. Only the leader's weights are
        used. They are copied at the yield if the loss is the best of the run so far, so that the network may train on
        afterwards.

        Raises TypeError where `weights` is no mapping of whole tensors by their names.
        """
        if isinstance(weights, torch.nn.Module):
            raise TypeError("worker.offer takes a network's weights: worker.offer(model.state_dict())")
        if not isinstance(weights, Mapping):
            raise TypeError(f"worker.offer takes a dict of tensors by their names, not a {_name(weights)}")
        for name, tensor in weights.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise TypeError(f"worker.offer takes a dict of tensors by their names, not {name!r}: {_name(tensor)}")
            if hasattr(tensor, "full_tensor"):  # a DTensor, without importing what defines it
                raise TypeError(_SHARDED.format(name=name))
        self._offer(weights)


def _name(thing: object) -> str:
    return type(thing).__name__
