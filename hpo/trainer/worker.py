"""The `Worker` object that an objective gets, and its methods that send Python objects."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpo.trainer.offers import Offers
from hpo.trainer.state_files import OfferedWeights, check_weights, is_state_function

_HEADER_BYTES = 8  # The header of a sent object has its length in bytes.


class Comm:
    """Communicates Python objects among a worker's ranks, over torch.distributed with gloo.

    Methods, arguments and the attributes ``rank`` and ``size`` have the names of mpi4py. Objects
    are pickled. All methods except `send` and `recv` are collective: call them on all ranks. A rank
    that waits for others for longer than `--collective-timeout` raises RuntimeError.

    Example:
        ::

            losses = worker.comm.allgather(loss)  # one loss per rank
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Each work is kept with the tensor that it sends.
        self._pending_sends: list[tuple[Any, Any]] = []

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the rank of this process in the worker."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of ranks in the worker."""
        return self.size

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.allgather(None)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return on all ranks the `obj` that rank `root` has passed."""
        objects = [obj]
        if self.size > 1:
            dist.broadcast_object_list(objects, src=root, device=torch.device("cpu"))
        return objects[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return a list with the `sendobj` of each rank on rank `root`; None on other ranks."""
        if self.size == 1:
            return [sendobj]
        objects: list[Any] | None = [None] * self.size if self.rank == root else None
        dist.gather_object(sendobj, objects, dst=root)
        return objects

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return on all ranks a list with the `sendobj` of each rank, in the order of ranks."""
        objects: list[Any] = [sendobj] * self.size
        if self.size > 1:
            dist.all_gather_object(objects, sendobj)
        return objects

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return the `sendobj` of all ranks, combined by `op` in the order of ranks.

        By default, the objects are added.
        """
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(
        self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0
    ) -> Any:
        """Return the result of `allreduce` on rank `root`; None on other ranks."""
        result = self.allreduce(sendobj, op)
        return result if self.rank == root else None

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to the rank `dest` without waiting for the receiver.

        The receiver must call `recv` with the same `tag`, a number that distinguishes kinds of
        messages.
        """
        payload = pickle.dumps(obj)
        header = torch.frombuffer(
            bytearray(len(payload).to_bytes(_HEADER_BYTES, "little")), dtype=torch.uint8
        )
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._pending_sends = [
            (work, tensor) for work, tensor in self._pending_sends if not work.is_completed()
        ]
        for tensor in (header, body):
            self._pending_sends.append((dist.isend(tensor, dest, tag=tag), tensor))

    def recv(self, source: int | None = None, tag: int = 0) -> Any:
        """Receive an object that rank `source` has sent with the same `tag`.

        If `source` is None or negative, the object may come from any rank.
        """
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        known = None if source is None or source < 0 else source
        sender = dist.recv(header, known, tag=tag)
        body = torch.empty(int.from_bytes(header.numpy().tobytes(), "little"), dtype=torch.uint8)
        dist.recv(body, sender, tag=tag)
        return pickle.loads(body.numpy().tobytes())

    @property
    def has_pending_sends(self) -> bool:
        """Whether an object that this rank has sent has not been received yet."""
        return not all(work.is_completed() for work, _ in self._pending_sends)


@dataclass(eq=False, repr=False)
class Worker:
    """The ranks that train one network together, which an objective gets as its second argument.

    Each evaluation gets a new object on each of these ranks. While an objective runs, the default
    process group of torch.distributed spans exactly these ranks. A rank that waits for its peers in
    a collective for longer than `--collective-timeout` raises an error.

    Example:
        ::

            def objective(params, worker):
                network = make_network(params).to(worker.device)
                for epoch in range(10):
                    train_epoch(network, worker.data, worker.rank, worker.size)
                    loss = compute_validation_loss(network, worker.data)  # on this rank's share
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
    """The seed for weights and sample order: that of the run, except with `--confirm-seeds`."""
    comm: Comm
    """Methods that send Python objects between the worker's ranks, with mpi4py's names."""
    index: int
    """The index of the worker in the run, from 0."""

    trial: int = 0
    """The number of the evaluation in the run. A retry has the number of the first attempt."""
    _folder: Path = Path()
    _offers: Offers = field(default_factory=Offers)
    _load_data: Callable[[], Any] = lambda: None
    _report: Callable[[Any, dict[str, Any]], None] = lambda *_: None

    @functools.cached_property
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

    @functools.cached_property
    def data(self) -> Any:
        """A private copy of the object that `prepare` returned; None without a `prepare`."""
        return self._load_data()

    @property
    def checkpoint(self) -> Any:
        """The latest checkpoint of this evaluation; None on a first start.

        An evaluation that was interrupted or paused has a checkpoint if it has saved one. Tensors
        are on the CPU, and each access returns a new copy. Reading it resumes the
        evaluation: the losses before the checkpoint are kept, and the next loss follows them.

        Raises:
            RuntimeError: The evaluation has already yielded or reported a loss in this process.
        """
        return self._offers.load_checkpoint()

    @property
    def parent_checkpoint(self) -> Any:
        """With `--pbt`, the latest checkpoint of the parent.

        It is None without a parent, or if the evaluation has a `checkpoint` to resume from.

        The parent is the individual that this one was bred from. It differs only in mutable
        parameters (declared with ``mutable=True``), and is among the best of its island. Load its
        weights and its optimizer state, but not values that follow from mutable parameters, such as
        the learning rate. Tensors are on the CPU, and each access returns a new copy.

        Raises:
            RuntimeError: The evaluation has already yielded or reported a loss.
        """
        return self._offers.load_parent_checkpoint()

    def save_checkpoint(self, state: Any) -> None:
        """Offer a state as a checkpoint. Call it before you yield or report its loss.

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
        self._offers.save_checkpoint(state)

    def report(self, loss: Any, /, **metrics: Any) -> None:
        """Report a validation loss from code that cannot yield, such as a callback.

        Collective: call on all ranks. It has the same effect as a yield. If the evaluation is over
        (pruned, target loss reached, out of time, failed on any rank, or the run stops), it raises
        an exception that ``except Exception`` does not catch. The value that the objective returns
        is ignored: the loss of the evaluation is the lowest reported loss.

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
        self._report(loss, metrics)

    def offer_weights(self, weights: OfferedWeights) -> None:
        """Offer the network's weights. Call it before you yield or report their loss.

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
        if not is_state_function(weights):
            check_weights(weights)
        self._offers.offer_weights(weights)
