"""MPI communicators whose waits sleep.

A rank that waits in a blocking MPI call polls at 95% of a core (measured with MPICH), which it takes from the ranks
that train wherever there are more ranks than cores. Here every wait tests a non-blocking call between short sleeps.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import re
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mpi4py import MPI

from hpo.process import clock
from hpo.ranks.blocks import BLOCK_BYTES, compute_rest_length, pack_object, unpack_object

# Short enough that nobody notices, long enough that a wait costs about 1% of a core. A collective goes on only when a
# rank tests it: with sleeps that doubled, ranks tested so late that two of them took 21 ms to agree on a loss, and four
# 55; with sleeps of a tenth of the wait so far, 1.4 and 2.9.
_MIN_SLEEP = 5e-5
_MAX_SLEEP = 5e-3
_SLEEP_RATIO = 0.1

_TURN_TAG = 1
_MIN_PENDING = 16  # messages that were sent, and perhaps not received

TIMEOUT_MESSAGE = "gave up after"  # how the error of a rank begins that has waited for others in vain

T = TypeVar("T")


def sleep_until(done: Callable[[], bool], limit: float = math.inf) -> bool:
    """Wait until `done()` is true, and return true; false if it is not after `limit` seconds.

    `done` is called less and less often. Seconds in which this process was stopped do not count.
    """
    began = clock.now()
    while not done():
        waited = clock.now() - began
        if waited > limit:
            return False
        sleep_briefly(waited)
    return True


def sleep_briefly(waited: float, longest: float = _MAX_SLEEP) -> None:
    """Sleep before another look, after so many seconds of waiting."""
    time.sleep(min(max(_MIN_SLEEP, _SLEEP_RATIO * waited), longest))


class SleepingComm(MPI.Intracomm):
    """An intracommunicator whose waits sleep, and can be interrupted, and whose sends never block.

    ``SleepingComm(comm)`` is another handle on `comm`, not a copy. Calls that are not overridden here block as usual. A
    rank that has waited for others for ``patience`` seconds raises TimeoutError.
    """

    _unreceived: list[MPI.Request]
    _max_pending = _MIN_PENDING
    patience = math.inf

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self._wait_for_request(self.Ibarrier())

    def copy(self) -> SleepingComm:
        """Return another communicator of the same ranks; collective."""
        comm, request = self.Idup()
        self._wait_for_request(request)
        return SleepingComm(comm)

    def split(self, color: int, key: int) -> SleepingComm:
        """Return a communicator of the ranks with this rank's color, in the order of their keys; collective."""
        self.barrier()  # MPI's call polls while it waits
        return SleepingComm(self.Split(color, key))

    def enter_barrier(self) -> Callable[[], bool]:
        """Enter a barrier without waiting, and return a function that tells whether all ranks have entered it."""
        return self.Ibarrier().Test

    def begin_gather(self, obj: Any) -> Gathering:
        """Begin to gather the objects of all ranks, without waiting."""
        return Gathering(self, obj)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of `root` on every rank."""
        block, rest = pack_object(obj) if self.rank == root else (bytearray(BLOCK_BYTES), bytearray())
        self._wait_for_request(self.Ibcast(block, root=root))
        if length := compute_rest_length(block):
            rest = rest or bytearray(length)
            self._wait_for_request(self.Ibcast(rest, root=root))
        return obj if self.rank == root else unpack_object(block, rest)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks, in their order."""
        gathering = self.begin_gather(sendobj)
        self._wait_until(gathering.is_done)
        return gathering.unpack_objects()

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks, in their order, on `root`; None on the others."""
        payload, is_root = pickle.dumps(sendobj), self.rank == root
        lengths = array("q", [0] * self.size) if is_root else None
        self._wait_for_request(self.Igather(array("q", [len(payload)]), lengths, root=root))
        everything = bytearray(sum(lengths or ()))
        parts = [everything, (list(lengths), None), MPI.BYTE] if lengths is not None else None
        self._wait_for_request(self.Igatherv(payload, parts, root=root))
        return _unpickle_objects(everything, lengths) if lengths is not None else None

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        """Return the objects of all ranks, combined by `op` in the order of the ranks."""
        return functools.reduce(op, self.allgather(sendobj))

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        """Return the objects of all ranks, combined by `op` in the order of ranks, on `root`; None on the others."""
        result = self.allreduce(sendobj, op)
        return result if self.rank == root else None

    def recv(
        self,
        buf: Any = None,  # noqa: ARG002 - mpi4py's first argument
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> Any:
        """Receive an object, and return it."""
        found: list[MPI.Message] = []

        def came() -> bool:
            message = self.improbe(source, tag, status)
            found.extend([message] if message is not None else [])
            return bool(found)

        self._wait_until(came)
        return found[0].recv()

    def Barrier(self) -> None:  # noqa: N802 - MPI's name
        """Wait until all ranks have arrived."""
        self.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:  # noqa: N802
        """Copy the buffer of `root` to every rank."""
        self._wait_for_request(self.Ibcast(buf, root))

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> None:  # noqa: N802
        """Combine the send buffers of all ranks by `op` in the receive buffer of every rank."""
        self._wait_for_request(self.Iallreduce(sendbuf, recvbuf, op))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send without waiting for the receiver.

        A blocking send of more than MPI's eager limit would wait until the receiver has finished its evaluation, and
        for ever where the receiver is this rank or is itself sending to this rank.
        """
        pending = self._get_pending()
        if len(pending) >= self._max_pending:  # to ask them all each time would take the square of their number
            pending = [request for request in pending if not request.Test()]
            self._max_pending = max(_MIN_PENDING, 2 * len(pending))
        pending.append(self.issend(obj, dest=dest, tag=tag))
        self._unreceived = pending

    def run_in_turns(self, at_once: int, step: Callable[[], T]) -> T:
        """Take a step on every rank, on `at_once` of them at a time, and return its result; collective."""
        if self.rank >= at_once:
            sleep_until(lambda: bool(self.iprobe(source=self.rank - at_once, tag=_TURN_TAG)))
            self.recv(source=self.rank - at_once, tag=_TURN_TAG)
        try:
            return step()
        finally:
            if self.rank + at_once < self.size:
                self.send(None, dest=self.rank + at_once, tag=_TURN_TAG)

    def drop_messages(self) -> None:
        """Receive and drop messages to this rank, until no message is on its way to any rank; collective.

        The non-blocking consensus of Hoefler, Siebert and Lumsdaine (2010), "Scalable communication protocols for
        dynamic sparse data exchange", algorithm 2: synchronous sends, and a barrier that a rank enters when its own
        messages have arrived.
        """
        barrier: list[MPI.Request] = []

        def silent() -> bool:
            while self.iprobe():
                self.recv()
            if not barrier and all(request.Test() for request in self._get_pending()):
                barrier.append(self.Ibarrier())
            return bool(barrier) and barrier[0].Test()

        sleep_until(silent)
        self._unreceived = []

    def _get_pending(self) -> list[MPI.Request]:
        return getattr(self, "_unreceived", [])

    def _wait_for_request(self, request: MPI.Request) -> None:
        self._wait_until(request.Test)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        if not sleep_until(lambda: not MPI.Is_finalized() and done(), self.patience):
            raise TimeoutError(f"{TIMEOUT_MESSAGE} {self.patience:g} s in a call of an MPI communicator")


class Gathering:
    """An allgather that has begun: each rank gives an object, and may do something else until all have come."""

    def __init__(self, comm: SleepingComm, obj: Any) -> None:
        self._comm = comm
        block, self._rest = pack_object(obj)
        self._blocks = bytearray(BLOCK_BYTES * comm.size)
        self._request = comm.Iallgather(block, self._blocks)

    def is_done(self) -> bool:
        """Tell whether all ranks have come."""
        return bool(self._request.Test())

    def unpack_objects(self) -> list[Any]:
        """Return the objects of all ranks, in their order, once all have come."""
        blocks = [self._blocks[start : start + BLOCK_BYTES] for start in range(0, len(self._blocks), BLOCK_BYTES)]
        lengths = [compute_rest_length(block) for block in blocks]
        rests = bytearray(sum(lengths))
        if rests:
            self._comm._wait_for_request(self._comm.Iallgatherv(self._rest, [rests, (lengths, None), MPI.BYTE]))
        ends = itertools.accumulate(lengths)
        return [unpack_object(block, rests[end - n : end]) for block, n, end in zip(blocks, lengths, ends, strict=True)]


def _unpickle_objects(everything: bytearray, lengths: Iterable[int]) -> list[Any]:
    """Return the objects whose pickles follow each other in a buffer, and have these lengths."""
    objects, start = [], 0
    for length in lengths:
        objects.append(pickle.loads(everything[start : start + length]))
        start += length
    return objects


def get_world() -> SleepingComm:
    """Return the communicator of all ranks of the job; only this function names MPI's world."""
    return SleepingComm(MPI.COMM_WORLD)


def unlink_shared_memory(host: SleepingComm) -> None:
    """Unlink the file through which MPICH's ranks on a host share memory; all of them have it open by now.

    MPICH unlinks it when MPI ends, so that the files of aborted jobs, 1 MB per rank, would stay until the host is
    booted. (MPICH 5.0.2 with UCX, whose own files are unlinked from the beginning.)
    """
    if host.rank == 0:
        with suppress(OSError):  # not Linux
            mapped = re.findall(r" (/dev/shm/mpich_shm_\w+)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
            for path in set(mapped):
                Path(path).unlink(missing_ok=True)


def finalize_mpi() -> None:
    """End MPI, on all ranks of the job at the same time, before Python itself ends."""
    MPI.Finalize()


def allows_threads() -> bool:
    """Tell whether any thread may use MPI at any time, which mpi4py asks for and an MPI may refuse."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def split_by_host(comm: SleepingComm) -> SleepingComm:
    """Return a communicator of those ranks of `comm` that are on this rank's host; collective."""
    comm.barrier()  # MPI's call polls while it waits
    return SleepingComm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))
