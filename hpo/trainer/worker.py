"""What an objective sees of the ranks that evaluate one individual together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch

if TYPE_CHECKING:
    from hpo.trainer.object_comm import Comm

# Weights, or a function that gathers them.
OfferedWeights = Union[Mapping[str, torch.Tensor], Callable[[], Mapping[str, torch.Tensor]]]

_SHARDED_ERROR = (
    "offered weights must be whole tensors, and {name!r} is sharded: offer, on all ranks, get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict"
)


@dataclass(frozen=True)
class WorkerCallbacks:
    """What is called when an objective asks its worker for something, or tells it something."""

    load_data: Callable[[], Any] = lambda: None
    offer_weights: Callable[[OfferedWeights], object] = lambda _: None
    report: Callable[[Any, dict[str, Any]], None] = lambda *_: None
    save_checkpoint: Callable[[Any], object] = lambda _: None
    load_checkpoint: Callable[[], Any] = lambda: None
    load_parent_checkpoint: Callable[[], Any] = lambda: None


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
    devices: tuple[torch.device, ...]
    """The devices of this rank alone: a CPU, or GPUs, of which there may be several, as for stages of a pipeline."""
    seed: int
    """The seed for weights and the order of samples: the run's, or another one where an individual is confirmed."""
    comm: Comm
    """mpi4py's methods for Python objects among the worker's ranks; not an MPI communicator."""
    index: int
    """The worker's number in the run, from 0."""

    _callbacks: WorkerCallbacks
    trial: int = 0
    """The number of the evaluation in the run; one that is repeated or continues has that of its first attempt."""
    _folder: Path = Path()

    @cached_property
    def folder(self) -> Path:
        """A folder of this evaluation alone, RUN_DIR/trials/N, made on first use; it stays there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    @property
    def device(self) -> torch.device:
        """The `torch.device` that this rank computes on: the first of its devices."""
        return self.devices[0]

    @cached_property
    def data(self) -> Any:
        """What the search space's `prepare` returned, unchanged by other evaluations; None without a `prepare`."""
        return self._callbacks.load_data()

    @property
    def checkpoint(self) -> Any:
        """What this evaluation has saved last before it was interrupted or paused, to go on from; None where it begins.

        Tensors are on the CPU, and read anew each time this is asked for. An objective that has asked for it goes on:
        its next loss is the one after those that it had when this was saved, which stay its own. Raises RuntimeError
        once there is a next loss.
        """
        return self._callbacks.load_checkpoint()

    @property
    def parent_checkpoint(self) -> Any:
        """What the individual has saved last from which this one was bred, to begin with; None where there is none.

        With `--pbt`, that is an individual which differs in mutable parameters alone, and is among the best of its
        island. Take over its weights, and what else can be, but not what follows from the mutable hyperparameters, as
        learning rates do: this individual has its own. Tensors are on the CPU. An evaluation that goes on after it was
        interrupted has `restored` instead. Raises RuntimeError once there is a loss.
        """
        return self._callbacks.load_parent_checkpoint()

    def save_checkpoint(self, state: Any) -> None:
        """Offer what it takes to go on, before the loss that belongs to it is yielded or reported.

        `state` is made of dicts, lists and tuples of tensors, numpy arrays, numbers, texts, booleans and None, as
        `state_dict()` of networks, optimizers, schedulers and scalers returns, and `get_state()` of generators. It is
        copied after the loss where it is time to, so that training may go on afterwards: the last one comes back as
        `worker.checkpoint` if the evaluation is interrupted, or paused by a pruner. It is gone when the evaluation has
        ended, but with `--pbt`, where others may begin with it, as `worker.parent_checkpoint`.

        It should not depend on the number of ranks, which may be another one then. Only the leader's is used; sharded
        tensors are gathered, for which all ranks save them. `state` may be a function without arguments that returns
        it, given by all ranks, which is called on all of them together, and only if it is time to.

        Raises TypeError, naming the place, where `state` holds anything else; what a function returns fails the
        evaluation then.
        """
        self._callbacks.save_checkpoint(state)

    def report(self, loss: Any, /, **metrics: Any) -> None:
        """Report a validation loss, as a yield does, from code that owns its loop; all ranks do so together.

        Returns where the evaluation goes on. Where it is over (pruned, at the target loss, out of time, failed on any
        rank, or the run stops), the objective is ended by an exception that is no Exception, here and in any later
        call. What a function returns that has reported counts no more: the loss is the lowest that it has reported.

        A loss that is not finite, or is no number, fails the evaluation; so does a metric that is no number. Raises
        RuntimeError in a thread that is not the main thread, and after the evaluation has ended.
        """
        self._callbacks.report(loss, metrics)

    def offer_weights(self, weights: OfferedWeights) -> None:
        """Offer the network's weights, as its `state_dict()`, before the loss that they have is yielded or reported.

        The weights of the run's best individual are kept in RUN_DIR/best.safetensors, and with several objectives those
        of ten of the front in RUN_DIR/front. With ``--confirm-seeds``, RUN_DIR/confirmed has those of the confirmed
        winner. Only the leader's weights are used. They are copied with the loss if it is the best of the run so far,
        or would be on the front, so that the network may train on afterwards.

        `weights` may be a function without arguments that returns them, offered on all ranks. It is called on all ranks
        together, and only if they are to be kept: gathering the weights of a sharded network takes time.

        Raises TypeError where `weights` is neither a function nor a mapping of whole tensors by their names. So does,
        and fails the evaluation, what a function returns on the leader.
        """
        if isinstance(weights, Mapping) or not callable(weights) or isinstance(weights, torch.nn.Module):
            check_weights(weights)
        self._callbacks.offer_weights(weights)


def check_weights(weights: Any) -> Mapping[str, torch.Tensor]:
    """Return weights that were offered; raises TypeError where they are no mapping of whole tensors by their names."""
    if isinstance(weights, torch.nn.Module):
        raise TypeError("offered weights must be a state_dict(), got a network: offer model.state_dict()")
    if not isinstance(weights, Mapping):
        raise TypeError(f"offered weights must be a dict of tensors by their names, got a {_name_type(weights)}")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"offered weights must be a dict of tensors by their names, got {name!r}: {_name_type(tensor)}"
            )
        if hasattr(tensor, "full_tensor"):  # a DTensor, without importing what defines it
            raise TypeError(_SHARDED_ERROR.format(name=name))
    return weights


def _name_type(thing: object) -> str:
    return type(thing).__name__


def seed_torch(seed: int) -> None:
    """Seed torch as ``torch.manual_seed`` does, but only the devices that there are.

    For each kind that there is not, that function keeps the call for later, with a stack: 1 ms, and ever more of them.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
