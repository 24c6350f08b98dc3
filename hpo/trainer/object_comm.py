"""`worker.comm`: mpi4py's methods for Python objects, among the ranks of a worker."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_HEADER_BYTES = 8  # The header has the length of the object in bytes.


class Comm:
    """Communicates Python objects among a worker's ranks, over torch.distributed with gloo.

    It has ``rank`` and ``size`` as in mpi4py. Objects are pickled. All methods except `send` and `recv` are collective:
    call them on all ranks. A rank that waits for others for longer than `--collective-timeout` raises RuntimeError.

    Example:
        ::

            losses = worker.comm.allgather(loss)  # one loss per rank
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None  # None is the default group.
        self._pending_sends: list[tuple[Any, Any]] = []  # Each work is kept with the tensor that it sends.

    def connect(self) -> None:
        """Make a group with gloo if the default group has another backend, and wait until all ranks have connected.

        Without the wait, an objective that fails at once would break the connections that its peers are still making,
        and gloo would print an error on each peer. Collective: call on all ranks.
        """
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        if self.size > 1:
            dist.barrier(self._group)

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
        """Return the object of the rank `root` on all ranks. `obj` is ignored on the other ranks."""
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
        """Return the objects of all ranks, combined by a function of two objects in the order of ranks."""
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0) -> Any:
        """Return the result of `allreduce` on the rank `root`; None on the others."""
        result = self.allreduce(sendobj, op)
        return result if self.rank == root else None

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to the rank `dest` without waiting for the receiver."""
        payload = pickle.dumps(obj)
        header = torch.frombuffer(bytearray(len(payload).to_bytes(_HEADER_BYTES, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._pending_sends = [(work, tensor) for work, tensor in self._pending_sends if not work.is_completed()]
        for tensor in (header, body):
            self._pending_sends.append((dist.isend(tensor, dest, group=self._group, tag=tag), tensor))

    def recv(self, source: int | None = None, tag: int = 0) -> Any:
        """Receive an object with the same tag from the rank `source`; None or a negative number means any rank."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        known = None if source is None or source < 0 else source
        sender = dist.recv(header, known, group=self._group, tag=tag)
        body = torch.empty(int.from_bytes(header.numpy().tobytes(), "little"), dtype=torch.uint8)
        dist.recv(body, sender, group=self._group, tag=tag)
        return pickle.loads(body.numpy().tobytes())

    @property
    def has_pending_sends(self) -> bool:
        """Whether the receiver of an object has not received it yet."""
        return not all(work.is_completed() for work, _ in self._pending_sends)
