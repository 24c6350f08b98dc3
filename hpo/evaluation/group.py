"""The ranks of a worker: their communicator, and where their trainers find each other."""

from __future__ import annotations

import os
import select
import socket
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any

from hpo.evaluation.devices import backend_of, visible_to
from hpo.evaluation.host import Host
from hpo.evaluation.network import address_towards, interface_towards
from hpo.evaluation.torchrun import torchrun_variables
from hpo.evaluation.trainer import Trainer, TrainerSlot
from hpo.process.linux import identify_processes
from hpo.ranks.communicator import SleepingComm

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Group:
    """The ranks of a worker, or of several that evaluate one individual together; made by all of them together.

    `own_comm` is their communicator, and `index` the worker's number in the run. A rank waits for others for `patience`
    seconds at most. `slot` has this rank's trainer. While ``is_compared`` is set on all ranks, trainers compare their
    collectives before these begin.
    """

    def __init__(self, comm: SleepingComm, host: Host, index: int, patience: float, slot: TrainerSlot) -> None:
        self.own_comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.index = index
        self.patience = patience
        self.slot = slot
        self.is_compared = False
        self._name = ""  # of the process group of the trainers
        places = comm.allgather((host.number, socket.gethostname(), identify_processes(), host.gpus))
        self._hosts = [number for number, _, _, _ in places]
        self._names = [name for _, name, _, _ in places]
        self._on_one_host = len(set(self._hosts)) == 1
        self._shares_files = self._on_one_host and len({processes for _, _, processes, _ in places}) == 1
        self._backend = backend_of([gpus for *_, gpus in places])
        peers = [rank for rank, number in enumerate(self._hosts) if number == host.number]
        shown = [places[rank][3] for rank in peers]
        variables, self._devices = visible_to(shown, peers.index(self.rank), os.environ)
        slot.variables.update(variables)
        self._file = -1  # in which the trainers of one host find each other, on the leader
        self._listener: socket.socket | None = None  # where torch's store is to be served, on the leader
        self._store: Trainer | None = None  # which serves it
        self._address = self._open_port()
        self._variables = torchrun_variables(self.rank, self._hosts, self._address)

    trainer: Trainer
    """This rank's trainer in an evaluation, from `connect` on."""

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.slot.discard()
        self.close_store()
        if self._listener is not None:
            self._listener.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def connect(self, note: Any = None) -> tuple[dict[str, Any] | None, Any]:
        """Return what this rank's trainer needs to make the process group, and the leader's `note`; collective.

        The first is None if the trainers of all ranks are in the group of the evaluation before.
        """
        is_ready = self.slot.is_ready and self.slot.group == self._name != ""
        told = self.own_comm.allgather((is_ready, note))
        note = told[0][1]
        if all(is_ready for is_ready, _ in told):
            self.trainer = self.slot.trainer
            return None, note
        if self.slot.group != self._name:
            self.slot.discard()  # it was in another group, whose connections would stay
        self.close_store()
        self._name, file = self.own_comm.bcast(self._begin_group() if self.rank == 0 else None)
        self.slot.output.begin(self.index, self.rank)
        self.trainer = self.slot.trainer
        self.slot.group = self._name
        return {
            "name": self._name,
            "rank": self.rank,
            "size": self.size,
            "index": self.index,
            "backend": self._backend,
            "devices": self._devices,
            "file": file,
            "address": self._address,
            "timeout": self.patience,
            "environment": {**self._variables, **self._choose_interface()},
        }, note

    @property
    def listeners(self) -> list[socket.socket]:
        """Where code of the user may connect to torch's store; none if it is served already, or by another rank."""
        return [self._listener] if self._listener is not None and self._store is None else []

    def serve_visitors(self) -> None:
        """Serve torch's store if a process has connected to it: one that reads MASTER_ADDR and MASTER_PORT."""
        if self.listeners and select.select(self.listeners, [], [], 0)[0]:
            assert self._listener is not None
            address, port = self._address
            self._store = self.slot.fork(self.slot.output)
            self._store.send("store", [self._listener.fileno()], address=address, port=port)

    def close_store(self) -> None:
        """Serve the store no more; the next one that is served is empty."""
        if self._store is not None:
            self._store.kill()
            self._store.close()
            self._store = None

    def _begin_group(self) -> tuple[str, str]:
        """Return the name of a new process group, and the path of the file in which its ranks find each other."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if not self._shares_files:
            return uuid.uuid4().hex, ""
        self._file = os.memfd_create("hpo-store")  # a file without a name, which nobody has to remove
        return uuid.uuid4().hex, f"/proc/{os.getpid()}/fd/{self._file}"

    def _open_port(self) -> tuple[str, int]:
        """Return the leader's address as its peers reach it, and the port of torch's store, served if asked for."""
        address = _LOOPBACK
        if not self._on_one_host:
            peer = next(name for name, host in zip(self._names, self._hosts, strict=True) if host != self._hosts[0])
            address = self.own_comm.bcast(address_towards(peer) if self.rank == 0 else None)
        self._interface = interface_towards(address) or ""
        port = 0
        if self.rank == 0:
            with suppress(OSError):
                self._listener = socket.create_server((address, 0), backlog=1024)
                port = self._listener.getsockname()[1]
        return address, int(self.own_comm.bcast(port))

    def _choose_interface(self) -> dict[str, str]:
        """Let gloo connect through the interface that leads to the other ranks, unless a user has named one."""
        if os.environ.get(_INTERFACE):
            return {}
        return {_INTERFACE: self._interface} if self._interface else {}
