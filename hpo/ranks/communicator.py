"""MPI communicators that sleep while they wait.

A rank that waits in a blocking MPI call uses 95% of a core (measured with MPICH). If there are more
ranks than cores, it slows down the ranks that train. Here each wait tests a non-blocking call
between short sleeps.
"""

from __future__ import annotations

import itertools
import math
import pickle
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpo.layout import order_ranks
from hpo.process import clock

# Seconds. Sleeps are short enough to be unnoticed, and long enough that a wait costs about 1% of a
# core. A collective proceeds only when a rank tests it. With sleeps that doubled, two ranks took 21
# ms to agree on a loss, and four ranks 55 ms. With sleeps of a tenth of the wait so far, they took
# 1.4 ms and 2.9 ms.
_MIN_SLEEP = 5e-5
_MAX_SLEEP = 5e-3
_SLEEP_RATIO = 0.1

_MIN_PENDING = 16  # number of sent messages from which on received ones are removed from the list

# An object is sent as a block of fixed length, and a rest if it is longer. Most objects fit into
# the block, so that one collective is enough. The block contains the length, so that the length
# needs no collective of its own.
_BLOCK_BYTES = 1024
_LENGTH_BYTES = 8  # length of the pickle, at the start of the block
_PAYLOAD_BYTES = _BLOCK_BYTES - _LENGTH_BYTES


def sleep_until(done: Callable[[], bool], limit: float = math.inf) -> bool:
    """Wait until `done()` is true, and return true; return false after `limit` seconds.

    The longer the wait, the less often `done` is called. Seconds in which this process was stopped
    do not count.
    """
    began = clock.now()
    while not done():
        waited = clock.now() - began
        if waited > limit:
            return False
        sleep_briefly(waited)
    return True


def sleep_briefly(waited: float, longest: float = _MAX_SLEEP) -> None:
    """Sleep before the next check of a condition, for a tenth of the seconds `waited` so far."""
    time.sleep(min(max(_MIN_SLEEP, _SLEEP_RATIO * waited), longest))


class SleepingComm(MPI.Intracomm):
    """An MPI communicator that sleeps while it waits, without a limit.

    Python's signal handlers can interrupt its waits. Its sends never block. `SleepingComm(comm)` is
    another handle of `comm`, not a copy. Calls that are not overridden here block as usual.
    """

    _unreceived: list[MPI.Request] | None = None
    _max_pending = _MIN_PENDING

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._wait_until(self.Ibarrier().Test)

    def copy(self) -> SleepingComm:
        """Return a separate communicator of the same ranks. Collective: call on all ranks."""
        comm, request = self.Idup()
        self._wait_until(request.Test)
        return SleepingComm(comm)

    def split(self, color: int, key: int) -> SleepingComm:
        """Return a communicator of all ranks that pass the same `color`, ordered by `key`.

        Collective: call on all ranks.
        """
        self.barrier()  # MPI's call uses a full core while it waits.
        return SleepingComm(self.Split(color, key))

    def begin_gather(self, obj: Any) -> Gathering:
        """Begin to gather one object of each rank on all ranks. Collective: call on all ranks."""
        return Gathering(self, obj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of rank `root` on all ranks."""
        block = bytearray(_BLOCK_BYTES)
        rest = bytearray()
        if self.rank == root:
            block, rest = _pack_object(obj)
        self._wait_until(self.Ibcast(block, root=root).Test)
        if length := _compute_rest_length(block):
            rest = rest or bytearray(length)
            self._wait_until(self.Ibcast(rest, root=root).Test)
        return obj if self.rank == root else _unpack_object(block, rest)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks."""
        gathering = self.begin_gather(sendobj)
        self._wait_until(gathering.is_done)
        return gathering.unpack_objects()

    def any(self, flag: bool) -> bool:
        """Return on all ranks whether any of them has passed true.

        On thousands of ranks, this is faster than to gather an object of each.
        """
        found = bytearray(1)
        sent = [bytearray([flag]), MPI.BYTE]
        self._wait_until(self.Iallreduce(sent, [found, MPI.BYTE], MPI.BOR).Test)
        return bool(found[0])

    def allgather_given(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks except None, in their order.

        If all are None, nothing is gathered.
        """
        if not self.any(sendobj is not None):
            return []
        return [given for given in self.allgather(sendobj) if given is not None]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in their order, on rank `root`; None on other ranks."""
        objects = self.allgather(sendobj)
        return objects if self.rank == root else None

    def recv(
        self,
        buf: Any = None,  # noqa: ARG002 - mpi4py's first argument
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Wait for an object from rank `source` with tag `tag`, and return it.

        No other thread may receive messages with this tag. So this needs no matched probe, which
        some interconnects lack (JuliaParallel/MPI.jl#759).
        """
        found = status or MPI.Status()
        self._wait_until(lambda: bool(self.iprobe(source, tag, found)))
        return self._receive(found)

    def receive_pending(self, tag: int) -> tuple[Any, int] | None:
        """Return the next object with this tag, and its sender; None if none has arrived."""
        status = MPI.Status()
        if not self.iprobe(tag=tag, status=status):
            return None
        return self._receive(status), status.Get_source()

    def _receive(self, status: MPI.Status) -> Any:
        """Return the object that a probe has found. A long one may first need a connection."""
        pickled = bytearray(status.Get_count(MPI.BYTE))
        source = status.Get_source()
        self._wait_until(self.Irecv([pickled, MPI.BYTE], source, status.Get_tag()).Test)
        return pickle.loads(pickled)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object without waiting for the receiver.

        A blocking send of a large object would wait until the receiver has finished its evaluation.
        It would never return if the receiver is this rank, or if the receiver also sends to this
        rank.
        """
        pending = self._unreceived or []
        # To test all of them at each send would take quadratic time.
        if len(pending) >= self._max_pending:
            pending = [request for request in pending if not request.Test()]
            self._max_pending = max(_MIN_PENDING, 2 * len(pending))
        pending.append(self.issend(obj, dest=dest, tag=tag))
        self._unreceived = pending

    def drop_messages(self) -> None:
        """Receive and drop all pending messages between the ranks. Collective: call on all ranks.

        Method: non-blocking consensus, algorithm 2 of Hoefler, Siebert and Lumsdaine (2010),
        "Scalable communication protocols for dynamic sparse data exchange". Sends are synchronous,
        and a rank enters a barrier when the messages that it has sent have arrived.
        """
        barrier: MPI.Request | None = None

        def is_silent() -> bool:
            nonlocal barrier
            while self.iprobe():
                self.recv()
            if barrier is None and all(request.Test() for request in self._unreceived or ()):
                barrier = self.Ibarrier()
            return barrier is not None and barrier.Test()

        sleep_until(is_silent)
        self._unreceived = None

    def _wait_until(self, done: Callable[[], bool]) -> None:
        sleep_until(lambda: not MPI.Is_finalized() and done())


class Gathering:
    """A non-blocking gather of one object per rank, which has begun."""

    def __init__(self, comm: SleepingComm, obj: Any) -> None:
        self._comm = comm
        block, self._rest = _pack_object(obj)
        self._blocks = bytearray(_BLOCK_BYTES * comm.size)
        self._request = comm.Iallgather(block, self._blocks)

    def is_done(self) -> bool:
        """Return whether all ranks have begun this gather."""
        return bool(self._request.Test())

    def unpack_objects(self) -> list[Any]:
        """Return the objects of all ranks, in their order. Call it after `is_done` is true."""
        blocks = [
            self._blocks[start : start + _BLOCK_BYTES]
            for start in range(0, len(self._blocks), _BLOCK_BYTES)
        ]
        lengths = [_compute_rest_length(block) for block in blocks]
        rests = bytearray(sum(lengths))
        if rests:
            received = [rests, (lengths, None), MPI.BYTE]
            self._comm._wait_until(self._comm.Iallgatherv(self._rest, received).Test)
        ends = itertools.accumulate(lengths)
        parts = zip(blocks, lengths, ends, strict=True)
        return [_unpack_object(block, rests[end - length : end]) for block, length, end in parts]


def _pack_object(obj: Any) -> tuple[bytearray, bytearray]:
    """Return the block of an object, and the rest of its pickled bytes, which may be empty."""
    payload = pickle.dumps(obj)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_PAYLOAD_BYTES]
    return bytearray(head.ljust(_BLOCK_BYTES, b"\0")), bytearray(payload[_PAYLOAD_BYTES:])


def _compute_rest_length(block: bytearray) -> int:
    """Return the length in bytes of the rest of an object; 0 if the object fits into its block."""
    return max(0, int.from_bytes(block[:_LENGTH_BYTES], "little") - _PAYLOAD_BYTES)


def _unpack_object(block: bytearray, rest: bytearray) -> Any:
    """Return the object that `_pack_object` has packed; a pickle ignores the bytes after it."""
    return pickle.loads(block[_LENGTH_BYTES:] + rest)


def get_world() -> SleepingComm:
    """Return the communicator of all ranks of the job. All code gets it from here."""
    return SleepingComm(MPI.COMM_WORLD)


def finalize_mpi() -> None:
    """Shut down MPI before Python exits. Collective: call on all ranks of the job."""
    MPI.Finalize()


def describe_mpi() -> str:
    """Return the name and the version of the MPI library."""
    line = MPI.Get_library_version().splitlines()[0].partition(",")[0]
    return " ".join(line.replace("Version:", "").replace("\0", "").split())


def allows_threads() -> bool:
    """Return whether all threads may call MPI at the same time.

    mpi4py requests this, but some MPI libraries do not support it.
    """
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def split_by_host(comm: SleepingComm) -> SleepingComm:
    """Return a communicator of the ranks on this host. Collective: call on all ranks of `comm`."""
    comm.barrier()  # MPI's call uses a full core while it waits.
    return SleepingComm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))


def sort_by_host(world: SleepingComm, host: SleepingComm, ranks_per_worker: int) -> SleepingComm:
    """Reorder the ranks of `world`, so that as few workers as possible span hosts.

    Consecutive ranks form a worker. Rank 0 stays rank 0. Collective: call on all ranks of `world`.
    """
    order = order_ranks(world.allgather(host.bcast(world.rank)), ranks_per_worker)
    return world if order == sorted(order) else world.split(0, order.index(world.rank))


def unlink_shared_memory(host: SleepingComm) -> None:
    """Unlink the file through which MPICH's ranks on a host share memory.

    All ranks must have opened it. MPICH 5.0.2 unlinks it only when MPI ends. After an abort, it
    would stay until the host reboots (1 MB per rank). UCX, which MPICH uses to communicate, unlinks
    its own files at its start, so they never stay.
    """
    if host.rank == 0:
        with suppress(OSError):  # Only Linux has /proc.
            mapped = re.findall(
                r" (/dev/shm/mpich_shm_\w+)$", Path("/proc/self/maps").read_text(), re.MULTILINE
            )
            for path in set(mapped):
                Path(path).unlink(missing_ok=True)
