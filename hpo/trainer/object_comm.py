"""`worker.comm`: methods that send Python objects between the ranks of a worker, with the names of mpi4py."""

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
        """Return on all ranks the `obj` that rank `root` has passed. The `obj` of other ranks is ignored."""
        objects = [obj]
        if self.size > 1:
            dist.broadcast_object_list(objects, src=root, device=torch.device("cpu"))
        return objects[0]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return on rank `root` a list with the `sendobj` of each rank, in the order of ranks; None on other ranks."""
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
        """Combine the `sendobj` of each rank by `op`, in the order of ranks, and return the result on all ranks.

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
