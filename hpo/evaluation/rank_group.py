"""The ranks of a worker: their communicator, and where their trainers find each other."""

from __future__ import annotations

import os
import select
import socket
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any

from hpo.evaluation.devices import choose_backend, make_gpu_variables
from hpo.evaluation.host import Host
from hpo.evaluation.host_network import find_interface, find_own_address
from hpo.evaluation.torchrun import make_torchrun_variables
from hpo.evaluation.trainer_client import TrainerClient, TrainerSlot
from hpo.process.linux import identify_pid_namespace
from hpo.ranks.communicator import SleepingComm

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"


class RankGroup:
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
        self.compares_collectives = False
        self._group_name = ""  # of the process group of the trainers
        places = comm.allgather((host.number, socket.gethostname(), identify_pid_namespace(), host.gpus))
        self._hosts = [number for number, _, _, _ in places]
        self._host_names = [name for _, name, _, _ in places]
        self._is_on_one_host = len(set(self._hosts)) == 1
        self._has_shared_files = self._is_on_one_host and len({processes for _, _, processes, _ in places}) == 1
        self._backend = choose_backend([gpus for *_, gpus in places])
        peers = [rank for rank, number in enumerate(self._hosts) if number == host.number]
        shown = [places[rank][3] for rank in peers]
        variables, self._devices = make_gpu_variables(shown, peers.index(self.rank), os.environ)
        slot.variables.update(variables)
        self._rendezvous_file = -1  # in which the trainers of one host find each other, on the leader
        self._listener: socket.socket | None = None  # where torch's store is to be served, on the leader
        self._store_server: TrainerClient | None = None  # which serves it
        self._address = self._open_store_port()
        self._variables = make_torchrun_variables(self.rank, self._hosts, self._address)

    trainer: TrainerClient
    """This rank's trainer in an evaluation, from `connect` on."""

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.slot.discard_trainer()
        self.close_store()
        if self._listener is not None:
            self._listener.close()
        if self._rendezvous_file >= 0:
            os.close(self._rendezvous_file)
            self._rendezvous_file = -1

    def connect(self, note: Any = None) -> tuple[dict[str, Any] | None, Any]:
        """Return what this rank's trainer needs to make the process group, and the leader's `note`; collective.

        The first is None if the trainers of all ranks are in the group of the evaluation before.
        """
        is_ready = self.slot.is_ready and self.slot.group_name == self._group_name != ""
        told = self.own_comm.allgather((is_ready, note))
        note = told[0][1]
        if all(is_ready for is_ready, _ in told):
            self.trainer = self.slot.trainer
            return None, note
        if self.slot.group_name != self._group_name:
            self.slot.discard_trainer()  # it was in another group, whose connections would stay
        self.close_store()
        self._group_name, file = self.own_comm.bcast(self._make_rendezvous() if self.rank == 0 else None)
        self.slot.output.set_label(self.index, self.rank)
        self.trainer = self.slot.trainer
        self.slot.group_name = self._group_name
        return {
            "name": self._group_name,
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
    def store_listeners(self) -> list[socket.socket]:
        """Where code of the user may connect to torch's store; none if it is served already, or by another rank."""
        return [self._listener] if self._listener is not None and self._store_server is None else []

    def serve_store(self) -> None:
        """Serve torch's store if a process has connected to it: one that reads MASTER_ADDR and MASTER_PORT."""
        if self.store_listeners and select.select(self.store_listeners, [], [], 0)[0]:
            assert self._listener is not None
            address, port = self._address
            self._store_server = self.slot.fork_other(self.slot.output)
            self._store_server.send("store", [self._listener.fileno()], address=address, port=port)

    def close_store(self) -> None:
        """Serve the store no more; the next one that is served is empty."""
        if self._store_server is not None:
            self._store_server.kill()
            self._store_server.close()
            self._store_server = None

    def _make_rendezvous(self) -> tuple[str, str]:
        """Return the name of a new process group, and the path of the file in which its ranks find each other."""
        if self._rendezvous_file >= 0:
            os.close(self._rendezvous_file)
            self._rendezvous_file = -1
        if not self._has_shared_files:
            return uuid.uuid4().hex, ""
        self._rendezvous_file = os.memfd_create("hpo-store")  # a file without a name, which nobody has to remove
        return uuid.uuid4().hex, f"/proc/{os.getpid()}/fd/{self._rendezvous_file}"

    def _open_store_port(self) -> tuple[str, int]:
        """Return the leader's address as its peers reach it, and the port of torch's store, served if asked for."""
        address = _LOOPBACK
        if not self._is_on_one_host:
            peer = next(
                name for name, host in zip(self._host_names, self._hosts, strict=True) if host != self._hosts[0]
            )
            address = self.own_comm.bcast(find_own_address(peer) if self.rank == 0 else None)
        self._interface = find_interface(address) or ""
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
