"""A stand-in for mpi4py, whose ranks are the processes of a simulation.

It guarantees what MPI does: messages between two ranks of a communicator arrive in their order.
All else has a random delay. Objects are pickled, so that ranks share nothing.
"""

from __future__ import annotations

import functools
import operator
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from tests.simulator.scheduler import Process, Scheduler

ANY_SOURCE = -2
ANY_TAG = -1
COMM_TYPE_SHARED = 1
THREAD_MULTIPLE = 3
BYTE = "byte"
BOR = "bitwise or"


class Network:
    """Delivers messages between the processes of a job.

    Attributes:
        scheduler: The scheduler of the simulation.
        ranks: The processes of all ranks of the job.
        on_abort: Called with the status when a rank aborts the job.
        message_count: The number of messages that were sent, without collectives.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: Sequence[Process],
        latency: float,
        on_abort: Callable[[int], None],
    ) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.on_abort = on_abort
        self.message_count = 0
        self._latency = latency
        self._last_arrival: dict[tuple[int, int, int], float] = {}
        self._contexts = 0
        self.world = self.make_context(list(range(len(ranks))))

    def make_context(self, members: Sequence[int]) -> Context:
        """Return a new context of a communicator, with these ranks of the job."""
        self._contexts += 1
        return Context(self, self._contexts, list(members))

    def draw_delay(self) -> float:
        """Return a random delay in seconds."""
        return self.scheduler.rng.expovariate(1 / self._latency)

    def deliver(self, context: Context, source: int, dest: int, message: Message) -> None:
        """Let a message arrive after a delay, and after all earlier ones of the same sender."""
        self.message_count += 1
        key = (context.number, source, dest)
        arrival = max(
            self.scheduler.time + self.draw_delay(), self._last_arrival.get(key, 0.0) + 1e-9
        )
        self._last_arrival[key] = arrival
        receiver = self.ranks[context.members[dest]]

        def arrive() -> None:
            context.inboxes[dest].append(message)
            self.scheduler.notify(receiver)

        self.scheduler.call_at(arrival, arrive)


@dataclass(eq=False)
class Message:
    """A message that was sent."""

    source: int
    tag: int
    payload: bytes
    is_received: bool = False


@dataclass(eq=False)
class Collective:
    """A collective operation, which some ranks have entered."""

    kind: str
    entered: dict[int, Any] = field(default_factory=dict)
    ready_at: dict[int, float] = field(default_factory=dict)
    """Time at which it is complete on each rank; filled when that is known."""
    results: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Context:
    """The state of a communicator, which its ranks share."""

    network: Network
    number: int
    members: list[int]
    """Rank in the job of each rank of the communicator."""
    inboxes: dict[int, list[Message]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    entered: dict[int, int] = field(default_factory=dict)
    """Number of collectives that each rank has entered."""

    def __post_init__(self) -> None:
        self.inboxes = {rank: [] for rank in range(len(self.members))}
        self.entered = dict.fromkeys(range(len(self.members)), 0)

    def enter(self, kind: str, rank: int, data: Any = None, root: int | None = None) -> Collective:
        """Enter the next collective on a rank. All ranks must enter the same kinds in one order."""
        number = self.entered[rank]
        self.entered[rank] += 1
        if number == len(self.collectives):
            self.collectives.append(Collective(kind))
        operation = self.collectives[number]
        if operation.kind != kind:
            raise AssertionError(
                f"rank {rank} of {self.members} enters {kind}, and others {operation.kind}"
            )
        operation.entered[rank] = data
        if root is not None:
            if root in operation.entered:
                self._complete(operation, list(operation.entered))
        elif len(operation.entered) == len(self.members):
            self._complete(operation, list(operation.entered))
        return operation

    def _complete(self, operation: Collective, ranks: Sequence[int]) -> None:
        scheduler = self.network.scheduler
        for rank in ranks:
            if rank not in operation.ready_at:
                ready_at = scheduler.time + self.network.draw_delay()
                operation.ready_at[rank] = ready_at
                process = self.network.ranks[self.members[rank]]
                scheduler.call_at(ready_at, partial(scheduler.notify, process))


class Request:
    """A request for a collective, or for a message that was sent."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self._test = test

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether the operation is complete."""
        return self._test()


class Status:
    """The source and the tag of a message."""

    def __init__(self) -> None:
        self.source = ANY_SOURCE
        self.tag = ANY_TAG
        self.count = 0

    def Get_source(self) -> int:  # noqa: N802
        """Return the rank of the sender."""
        return self.source

    def Get_tag(self) -> int:  # noqa: N802
        """Return the tag of the message."""
        return self.tag

    def Get_count(self, _: Any) -> int:  # noqa: N802
        """Return the number of bytes."""
        return self.count


class Intracomm:
    """A communicator, as one rank sees it."""

    context: Context
    rank: int

    def __init__(self, comm: Intracomm | None = None) -> None:
        if comm is not None:
            self.context = comm.context
            self.rank = comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.context.members)

    @property
    def _process(self) -> Process:
        return self.context.network.ranks[self.context.members[self.rank]]

    # Messages

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object. The request is complete when it is received."""
        message = Message(self.rank, tag, pickle.dumps(obj))
        network = self.context.network
        network.deliver(self.context, self.rank, dest, message)
        network.scheduler.preempt()
        return Request(lambda: message.is_received)

    def _find(self, source: int, tag: int, status: Status | None) -> Message | None:
        for message in self.context.inboxes[self.rank]:
            if source in (ANY_SOURCE, message.source) and tag in (ANY_TAG, message.tag):
                if status is not None:
                    status.source = message.source
                    status.tag = message.tag
                    status.count = len(message.payload)
                return message
        return None

    def iprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Return whether a message has arrived."""
        message = self._find(source, tag, status)
        if message is not None:  # Another thread may receive it first.
            self.context.network.scheduler.preempt()
        return message is not None

    def Irecv(self, buffer: Sequence[Any], source: int, tag: int) -> Request:  # noqa: N802
        """Receive the next message, which must have arrived."""
        message = self._find(source, tag, None)
        assert message is not None
        assert len(buffer[0]) == len(message.payload)
        buffer[0][:] = message.payload
        self.context.inboxes[self.rank].remove(message)
        message.is_received = True
        network = self.context.network
        network.scheduler.notify(network.ranks[self.context.members[message.source]])
        ready_at = network.scheduler.time + network.draw_delay()
        network.scheduler.call_at(ready_at, partial(network.scheduler.notify, self._process))
        return Request(lambda: network.scheduler.time >= ready_at)

    # Collectives

    def _enter(self, kind: str, data: Any = None, root: int | None = None) -> Collective:
        return self.context.enter(kind, self.rank, data, root)

    def _make_request(
        self, operation: Collective, finish: Callable[[], None] = lambda: None
    ) -> Request:
        scheduler = self.context.network.scheduler
        is_finished = False

        def test() -> bool:
            nonlocal is_finished
            ready_at = operation.ready_at.get(self.rank)
            if ready_at is None or scheduler.time < ready_at:
                return False
            if not is_finished:
                is_finished = True
                finish()
            return True

        scheduler.preempt()
        return Request(test)

    def Ibarrier(self) -> Request:  # noqa: N802
        """Begin a barrier."""
        return self._make_request(self._enter("barrier"))

    def Ibcast(self, buffer: bytearray, root: int = 0) -> Request:  # noqa: N802
        """Begin to send the bytes of one rank to all ranks."""
        data = bytes(buffer) if self.rank == root else None
        operation = self._enter("bcast", data, root)

        def finish() -> None:
            buffer[:] = operation.entered[root]

        return self._make_request(operation, finish)

    def Iallreduce(  # noqa: N802
        self,
        sent: Sequence[Any],
        received: Sequence[Any],
        op: str,  # noqa: ARG002 - always the bitwise or
    ) -> Request:
        """Begin to combine a byte of each rank by a bitwise or."""
        operation = self._enter("allreduce", sent[0][0])

        def finish() -> None:
            received[0][0] = functools.reduce(operator.or_, operation.entered.values())

        return self._make_request(operation, finish)

    def Iallgather(self, sent: bytearray, received: bytearray) -> Request:  # noqa: N802
        """Begin to gather the bytes of all ranks on all ranks."""
        operation = self._enter("allgather", bytes(sent))

        def finish() -> None:
            received[:] = b"".join(operation.entered[rank] for rank in range(self.size))

        return self._make_request(operation, finish)

    def Iallgatherv(self, sent: bytearray, received: Sequence[Any]) -> Request:  # noqa: N802
        """Begin to gather different numbers of bytes."""
        operation = self._enter("allgatherv", bytes(sent))

        def finish() -> None:
            received[0][:] = b"".join(operation.entered[rank] for rank in range(self.size))

        return self._make_request(operation, finish)

    def Idup(self) -> tuple[Intracomm, Request]:  # noqa: N802
        """Begin to make a communicator of the same ranks."""
        operation = self._enter("dup")
        if "context" not in operation.results:
            operation.results["context"] = self.context.network.make_context(self.context.members)
        comm = _make_comm(operation.results["context"], self.rank)
        return comm, self._make_request(operation)

    def Split(self, color: int, key: int) -> Intracomm:  # noqa: N802
        """Return a communicator of the ranks with the same color, ordered by key."""
        operation = self._enter("split", (color, key))
        scheduler = self.context.network.scheduler
        scheduler.wait(self._make_request(operation).Test)
        if color not in operation.results:
            chosen = [
                (other_key, rank)
                for rank, (other, other_key) in operation.entered.items()
                if other == color
            ]
            members = [self.context.members[rank] for _, rank in sorted(chosen)]
            operation.results[color] = self.context.network.make_context(members)
        context: Context = operation.results[color]
        return _make_comm(context, context.members.index(self.context.members[self.rank]))

    def Split_type(self, split_type: int, key: int) -> Intracomm:  # noqa: ARG002, N802
        """Return a communicator of the ranks on this host."""
        hosts = [process.host for process in self.context.network.ranks]
        host = hosts[self.context.members[self.rank]]
        return self.Split(hosts.index(host), key)

    def Abort(self, status: int) -> None:  # noqa: N802
        """End the job. The call may return, since the job does not end at once."""
        self.context.network.on_abort(status)


def _make_comm(context: Context, rank: int) -> Intracomm:
    comm = Intracomm()
    comm.context = context
    comm.rank = rank
    return comm


def make_world(network: Network, rank: int) -> Intracomm:
    """Return the communicator of all ranks, as one of them sees it."""
    return _make_comm(network.world, rank)


def make_module() -> ModuleType:
    """Return the module that stands for `mpi4py.MPI`."""
    module = ModuleType("mpi4py.MPI")
    names = ("Intracomm", "Request", "Status", "ANY_SOURCE", "ANY_TAG", "BYTE", "BOR")
    for name in (*names, "COMM_TYPE_SHARED", "THREAD_MULTIPLE"):
        setattr(module, name, globals()[name])
    module.Comm = Intracomm  # type: ignore[attr-defined]
    module.COMM_WORLD = module.COMM_SELF = Intracomm()  # type: ignore[attr-defined]
    module.Is_finalized = lambda: False  # type: ignore[attr-defined]
    module.Query_thread = lambda: THREAD_MULTIPLE  # type: ignore[attr-defined]
    return module


def install() -> None:
    """Let `from mpi4py import MPI` import the stand-in. Call it before hpo is imported."""
    package = ModuleType("mpi4py")
    package.MPI = make_module()  # type: ignore[attr-defined]
    package.__version__ = "0"  # type: ignore[attr-defined]
    sys.modules.update({"mpi4py": package, "mpi4py.MPI": package.MPI})
