"""`worker.comm`: mpi4py's methods for Python objects, among the ranks of a worker."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_HEADER_BYTES = 8  # bytes, with the length of what follows


class Comm:
    """Communicates Python objects among a worker's ranks, over torch.distributed with gloo.

    ``rank`` and ``size`` are as in mpi4py. Objects are pickled. All methods but `send` and `recv` are collective: call
    them on all ranks. A rank that waits for others for longer than `--collective-timeout` raises RuntimeError.

    ::

        losses = worker.comm.allgather(loss)
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None  # of its own where the default group is not gloo's
        self._pending_sends: list[tuple[Any, Any]] = []  # work, with the tensors that it sends

    def connect(self) -> None:
        """Make a group for objects if the default group's backend is not gloo, and wait until all ranks have connected.

        Otherwise an objective that fails at once would break the connections that its peers are still making, and gloo
        prints an error on each of them. Collective.
        """
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        if self.size > 1:
            dist.barrier(self._group)

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return this rank's number in the worker."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of ranks in the worker."""
        return self.size

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.allgather(None)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the rank `root` on all ranks."""
        objects = [obj]
        if self.size > 1:
            dist.broadcast_object_list(objects, src=root, group=self._group, device=torch.device("cpu"))
        return objects[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in the order of ranks, on the rank `root`; None on the others."""
        if self.size == 1:
            return [sendobj]
        objects: list[Any] | None = [None] * self.size if self.rank == root else None
        dist.gather_object(sendobj, objects, dst=root, group=self._group)
        return objects

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        objects: list[Any] = [sendobj] * self.size
        if self.size > 1:
            dist.all_gather_object(objects, sendobj, group=self._group)
        return objects

    def allreduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return the objects of all ranks, combined by a function of two of them in the order of ranks."""
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0) -> Any:
        """Return what `allreduce` returns on the rank `root`, None on the others."""
        result = self.allreduce(sendobj, op)
        return result if self.rank == root else None

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to a rank, and do not wait for the receiver."""
        payload = pickle.dumps(obj)
        header = torch.frombuffer(bytearray(len(payload).to_bytes(_HEADER_BYTES, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._pending_sends = [(work, tensor) for work, tensor in self._pending_sends if not work.is_completed()]
        for tensor in (header, body):
            self._pending_sends.append((dist.isend(tensor, dest, group=self._group, tag=tag), tensor))

    def recv(self, source: int | None = None, tag: int = 0) -> Any:
        """Receive an object from a rank, or from any if `source` is None or negative, sent with the same tag."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        known = None if source is None or source < 0 else source
        sender = dist.recv(header, known, group=self._group, tag=tag)
        body = torch.empty(int.from_bytes(header.numpy().tobytes(), "little"), dtype=torch.uint8)
        dist.recv(body, sender, group=self._group, tag=tag)
        return pickle.loads(body.numpy().tobytes())

    @property
    def has_pending_sends(self) -> bool:
        """Whether this rank has sent what has not been received."""
        return not all(work.is_completed() for work, _ in self._pending_sends)
