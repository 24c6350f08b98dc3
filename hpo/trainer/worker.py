"""The `Worker` object that an objective gets. It describes the ranks that train one network together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch

from hpo.trainer.accelerator import find_accelerator_in_use

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
    """Functions that a `Worker` calls when the objective uses its properties and methods."""

    load_data: Callable[[], Any] = lambda: None
    offer_weights: Callable[[OfferedWeights], object] = lambda _: None
    report: Callable[[Any, dict[str, Any]], None] = lambda *_: None
    save_checkpoint: Callable[[Any], object] = lambda _: None
    load_checkpoint: Callable[[], Any] = lambda: None
    load_parent_checkpoint: Callable[[], Any] = lambda: None


@dataclass(eq=False, repr=False)
class Worker:
    """The ranks that train one network together. An objective gets this object as its second argument.

    Each evaluation gets a new object on each of these ranks. While an objective runs, the default
    process group of torch.distributed spans exactly these ranks. A rank that waits for its peers in
    a collective for longer than `--collective-timeout` raises an error.

    Example:
        ::

            def objective(params, worker):
                network = make_network(params).to(worker.device)
                for epoch in range(10):
                    train_epoch(network, worker.data, worker.rank, worker.size)
                    loss = compute_validation_loss(network, worker.data)  # this rank's share, a tensor
                    torch.distributed.all_reduce(loss)  # over the worker's ranks
                    worker.offer_weights(network.state_dict())
                    yield loss.item() / worker.size
    """

    rank: int
    """The rank of this process in the worker, from 0; rank 0 is the leader."""
    size: int
    """The number of ranks in the worker."""
    devices: tuple[torch.device, ...]
    """The devices of this rank alone. Either one CPU, or one or more GPUs."""
    seed: int
    """The seed for weights and sample order. It is the seed of the run, except for evaluations of `--confirm-seeds`."""
    comm: Comm
    """Methods that send Python objects between the worker's ranks. They have mpi4py's names, but do not use MPI."""
    index: int
    """The index of the worker in the run, from 0."""

    _callbacks: WorkerCallbacks
    trial: int = 0
    """The number of the evaluation in the run. A retry or a resumed evaluation has the number of its first attempt."""
    _folder: Path = Path()

    @cached_property
    def folder(self) -> Path:
        """The directory of this evaluation. It is created on first use and never removed.

        It is RUN_DIR/trials/N, and RUN_DIR/trials/confirm-N for evaluations of `--confirm-seeds`. N
        is `trial`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on, the first of `devices`."""
        return self.devices[0]

    @cached_property
    def data(self) -> Any:
        """A private copy of the object that `prepare` of the search file returned; None without a `prepare`."""
        return self._callbacks.load_data()

    @property
    def checkpoint(self) -> Any:
        """The latest checkpoint of this evaluation if it was interrupted or paused; None on a first start.

        Tensors are on the CPU, and each access returns a new copy. Reading it resumes the
        evaluation: the losses before the checkpoint are kept, and the next loss follows them.

        Raises:
            RuntimeError: The evaluation has already yielded or reported a loss in this process.
        """
        return self._callbacks.load_checkpoint()

    @property
    def parent_checkpoint(self) -> Any:
        """With `--pbt`, the latest checkpoint of the parent, which is the individual that this one was bred from.

        It is None without a parent, or if the evaluation has a `checkpoint` to resume from.

        The parent differs only in mutable parameters (declared with ``mutable=True``), and is among
        the best of its island. Load its weights and its optimizer state, but not values that follow
        from mutable parameters, such as the learning rate. Tensors are on the CPU, and each access
        returns a new copy.

        Raises:
            RuntimeError: The evaluation has already yielded or reported a loss.
        """
        return self._callbacks.load_parent_checkpoint()

    def save_checkpoint(self, state: Any) -> None:
        """Offer a state as a checkpoint. Call it before you yield or report the loss that belongs to the state.

        The state is copied with the loss if a checkpoint is due (`--checkpoint-every`), so training
        may change it afterwards. If the evaluation is interrupted, or paused by a pruner, it can
        resume from the latest copy, which is then `worker.checkpoint`. The copy is removed when the
        evaluation ends. With `--pbt`, it is kept as `worker.parent_checkpoint` of other
        individuals.

        Only the leader's state is used, but call it on all ranks if the state is a function or has
        sharded tensors, which are gathered. The state must not depend on the number of ranks, which
        may differ when it is loaded.

        Args:
            state: Dicts, lists and tuples of tensors, numpy arrays, numbers, texts, booleans and
                None, such as ``state_dict()`` returns. Or a function without arguments that returns
                them: it is called on all ranks together, and only if a checkpoint is due.

        Raises:
            TypeError: The state has another value; the message names its position. If a function
                returned the state, the evaluation fails.

        Example:
            ::

                start = 0
                if (state := worker.checkpoint) is not None:
                    network.load_state_dict(state["network"])
                    start = state["epoch"]
                for epoch in range(start, 10):
                    loss = train_epoch(network)
                    worker.save_checkpoint({"network": network.state_dict(), "epoch": epoch + 1})
                    yield loss
        """
        self._callbacks.save_checkpoint(state)

    def report(self, loss: Any, /, **metrics: Any) -> None:
        """Report a validation loss from code that cannot yield, such as a callback. Collective: call on all ranks.

        It has the same effect as a yield. If the evaluation is over (pruned, target loss reached,
        out of time, failed on any rank, or the run stops), it raises an exception that ``except
        Exception`` does not catch. The value that the objective returns is ignored: the loss of the
        evaluation is the lowest reported loss.

        Args:
            loss: The validation loss, the same on all ranks: a finite number, or a tensor or numpy
                array of one element. Any other value fails the evaluation.
            metrics: Other numbers by their names. A metric that is not a number fails the
                evaluation; metrics that are not finite are left out.

        Raises:
            RuntimeError: It is called outside the main thread, in a forked process, in a function
                given to `offer_weights`, or after the evaluation.

        Example:
            ::

                for epoch in range(10):
                    loss, accuracy = train_epoch(network)
                    worker.report(loss, accuracy=accuracy)
        """
        self._callbacks.report(loss, metrics)

    def offer_weights(self, weights: OfferedWeights) -> None:
        """Offer the network's weights. Call it before you yield or report the loss that belongs to them.

        Only the leader's weights are used. They are copied with the loss if it is the lowest of the
        run so far, or on the Pareto front, so the network may train on afterwards.
        RUN_DIR/best.safetensors has the weights of the best individual; with several objectives,
        RUN_DIR/front has those of up to ten individuals of the front. With `--confirm-seeds`,
        RUN_DIR/confirmed has the weights of the confirmed winner.

        Args:
            weights: Unsharded tensors by their names, such as ``state_dict()`` returns. Or a
                function without arguments that returns such tensors, for a sharded network, whose
                weights take time to gather. Offer the function on all ranks. All ranks call it
                together, and only if the weights are kept.

        Raises:
            TypeError: `weights` is neither a function nor a mapping of unsharded tensors by their
                names. If a function returned the weights, the evaluation fails.

        Example:
            ::

                worker.offer_weights(network.state_dict())
                yield loss
        """
        if (
            isinstance(weights, Mapping)
            or not callable(weights)
            or isinstance(weights, torch.nn.Module)
        ):
            check_weights(weights)
        self._callbacks.offer_weights(weights)


def check_weights(weights: Any) -> Mapping[str, torch.Tensor]:
    """Return the offered weights. Raises TypeError unless they map names to unsharded tensors."""
    if isinstance(weights, torch.nn.Module):
        raise TypeError(
            "offered weights must be a state_dict(), got a network: offer model.state_dict()"
        )
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"offered weights must be a dict of tensors by their names, got a {_name_type(weights)}"
        )
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"offered weights must be a dict of tensors by their names, got {name!r}: {_name_type(tensor)}"
            )
        # This identifies a DTensor without an import of torch.distributed.tensor.
        if hasattr(tensor, "full_tensor"):
            raise TypeError(_SHARDED_ERROR.format(name=name))
    return weights


def _name_type(value: object) -> str:
    return type(value).__name__


def seed_torch(seed: int) -> None:
    """Seed torch's random generators of the CPU, and of the accelerators that this process uses.

    It replaces ``torch.manual_seed``, which also queues a call for each type of device that is
    missing. Each queued call takes 1 ms, and the queue grows.
    """
    torch.default_generator.manual_seed(seed)
    if (accelerator := find_accelerator_in_use()) is not None:
        accelerator.manual_seed_all(seed)
