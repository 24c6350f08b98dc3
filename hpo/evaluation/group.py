"""What connects a rank to the others of its worker: an MPI subcommunicator, and a torch process group."""

from __future__ import annotations

import gc
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpo.errors import RunError
from hpo.evaluation.collectives import Check, always_checked, never_checked, without_torchs_check
from hpo.evaluation.connections import Connections
from hpo.evaluation.devices import backend_of
from hpo.evaluation.host import Host
from hpo.evaluation.network import address_towards, interface_towards
from hpo.evaluation.rendezvous import Rendezvous
from hpo.evaluation.subgroups import Subgroups
from hpo.evaluation.worker import Calls, Worker, seed_torch
from hpo.process.deferred import defer
from hpo.process.descriptors import Reserve
from hpo.ranks.communicator import LentComm, SleepingComm
from hpo.ranks.sharing import temporary_file
from hpo.text import message

# torch calls its compiler even if nothing is compiled (torch 2.14 and 2.15): optimizers exclude themselves from it,
# DistributedDataParallel asks whether it splits its graphs, and init_process_group clears its cache. These calls are
# answered here. All others import the compiler, torch.compile first of all: that takes 0.8 s of CPU on every rank and
# opens 600 files.
defer(
    "torch._dynamo",
    disable=lambda function, *_, **__: function,
    graph_break=lambda: None,
    trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LIMIT = timedelta(minutes=5)  # to connect
_SECONDS_OF_A_DEATH = 5.0  # until MPI has ended the job of a rank that has died


class Group:
    """The ranks of a worker: their communicators, this rank's device, and their torch process group.

    Made by all ranks of a worker together. `comm` is their subcommunicator, and `index` the worker's number in the run.
    A rank waits for others for `collective_timeout` seconds at most. Collectives are checked until `trust` is called.
    """

    def __init__(self, comm: SleepingComm, host: Host, index: int, collective_timeout: float) -> None:
        self.own_comm = comm  # for this program; objectives have `comm`
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._host = host
        self.devices = host.devices
        self.device = self.devices[0]
        self.index = index
        self.comm = self._lend(collective_timeout)
        self._on_one_host = MPI.Group.Intersection(comm.group, host.ranks).size == comm.size
        self._backend = backend_of(comm, self.device)
        self._collective_timeout = timedelta(seconds=collective_timeout)
        self._connections = Connections()
        self._subgroups = Subgroups(self._collective_timeout)
        self.descriptors = Reserve()
        self._is_cut = False
        self._store: Rendezvous | None = None
        self._file: Path | None = None  # of the store, on the leader
        self._interface = ""
        self._groups = 0
        self._check: Check | None = None
        self._is_trusted = never_checked()

    def __enter__(self) -> Group:
        self._subgroups.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()
        self._subgroups.__exit__()
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    @property
    def patience(self) -> float:
        """The seconds for which ranks wait for each other."""
        return self._collective_timeout.total_seconds()

    def worker(self, seed: int, calls: Calls = Calls()) -> Worker:  # noqa: B008 - it cannot be changed
        """Return the worker as one objective sees it, and seed all random numbers with `seed`."""
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        about = (self.rank, self.size, self.devices, seed, self.comm, self.index)
        return Worker(*about, calls)

    def connect(self, alone: AbstractContextManager[object] | None = None, note: Any = None) -> Any:
        """Make the process group, unless all ranks have one whose connections are whole; collective.

        While `alone` is entered, no other thread of this process opens connections. Returns the leader's `note`, which
        needs no message of its own. Raises RunError where this rank cannot connect to its peers.
        """
        is_whole = dist.is_initialized() and not self._is_cut and self._connections.are_whole
        said = self.own_comm.allgather((is_whole, note))
        if not all(is_whole for is_whole, _ in said):
            self._make_group(alone)
        return said[0][1]

    def _make_group(self, alone: AbstractContextManager[object] | None) -> None:
        self.disconnect()
        if self._store is None:
            self._store = self._open_store()
        self._groups += 1
        self._store.patience = _LIMIT.total_seconds()
        store = PrefixStore(f"{self._groups}", self._store)
        self._choose_interface()
        with alone or nullcontext(), self._connections.opening():
            with self._connecting(), without_torchs_check():
                dist.init_process_group(
                    self._backend,
                    store=store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=_LIMIT,
                    # nccl would have to guess the device where a collective has no tensor, and groups of some ranks
                    # are split from one that knows it.
                    device_id=self.device if self._backend == "nccl" else None,
                )
            self._store.patience = self._collective_timeout.total_seconds()
            _group()._get_backend(self.device)._set_default_timeout(self._collective_timeout)
            if self._is_to_be_checked():
                with suppress(RuntimeError):  # they could not connect in so short a time
                    self._check = Check(_group(), self.device, store, self._collective_timeout)
        # The ranks wait for each other here: an objective that fails at once cuts its connections, which a peer that is
        # still connecting would take for a crash.
        if all(self.own_comm.allgather(self._check is not None)) and self._check is not None:
            self._check.begin()

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Raise RunError where this rank cannot connect to its peers, which may still be trying."""
        try:
            yield
        except RuntimeError as error:  # torch's own errors among them
            # Where a peer has died, MPI ends the job in this time, and this rank must not print another error.
            time.sleep(_SECONDS_OF_A_DEATH)
            name = os.environ.get(_INTERFACE)
            hint = f" ({_INTERFACE}={name})" if name else ""
            text = f"rank {self.rank} of worker {self.index} cannot connect to its peers{hint}: {message(error)}"
            raise RunError(text) from error

    def trust(self) -> None:
        """Check collectives no more; once all ranks have agreed on a loss, mistakes in the code have shown."""
        self._is_trusted = True
        if self._check is not None and not always_checked():
            self._check.end()
            self._check = None

    def _is_to_be_checked(self) -> bool:
        """Tell whether collectives are checked: with nccl, where mistakes do not end the process, only on request."""
        return self.size > 1 and (always_checked() or (self._backend == "gloo" and not self._is_trusted))

    def _open_store(self) -> Rendezvous:
        """Open the store through which the ranks of all process groups of this worker find each other; collective.

        On one host, it is a file. Between hosts, the leader's store listens on a port that the system chose, so that no
        other run has the same. One store serves for all groups, since to connect takes long: torch asks the name
        service for the name of each address, even of 127.0.0.1, which takes 5 s and more where no answer comes, as on
        compute nodes without a network, and where many ask at once: of 32 workers that started together, one to seven
        waited so long.
        """
        address = _LOOPBACK if self._on_one_host else _address(self.own_comm)
        self._interface = interface_towards(address) or ""
        if self.size == 1:
            return Rendezvous(HashStore())
        if self._on_one_host:
            return Rendezvous(self._shared_file())
        store = None
        if self.rank == 0:
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)
        port = self.own_comm.bcast(store.port if store else None)
        with self._connecting():
            store = store or TCPStore(address, port, is_master=False, timeout=_LIMIT)
        self.own_comm.barrier()  # all connections of the store are open, and not noted as a group's
        return Rendezvous(store)

    def _shared_file(self) -> FileStore:
        """Return a store in a file, which is there until the leader leaves the group."""
        if self.rank == 0:
            handle, path = temporary_file()
            os.close(handle)
            self._file = Path(path)
        return FileStore(str(self.own_comm.bcast(self._file)), self.size)

    def _choose_interface(self) -> None:
        """Let gloo connect through the interface that leads to the others of this group, unless a user has named one.

        gloo reads the variable when a process group is made; a rank is in a group on its host, and in others beyond it.
        """
        if os.environ.get(_INTERFACE, "") in ("", self._host.interface):
            self._host.interface = self._interface
            os.environ.pop(_INTERFACE, None)
            if self._interface:
                os.environ[_INTERFACE] = self._interface

    def cut(self) -> None:
        """Let this rank's collectives fail, the one that it waits in and all later ones; its peers go on to wait.

        May be called from any thread. Destroying the process group is not enough: gloo closes connections only when no
        object refers to the group any more, and models, exceptions and all that an objective keeps may do so.
        """
        self._is_cut = True
        self.descriptors.take_back()
        self._subgroups.abort()
        self._connections.cut()

    def disconnect(self) -> None:
        """Take this rank out of its process group, and free the memory that evaluations have left."""
        self._connections.cut()
        self._subgroups.connections.cut()
        self._check = None
        if dist.is_initialized():
            dist.destroy_process_group()
        self._connections.close()
        self._subgroups.connections.close()
        self._is_cut = False
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def tidy(self) -> None:
        """Destroy the process groups that an evaluation has made; it has ended on all ranks."""
        self._subgroups.destroy()

    def renew_comm(self) -> None:
        """Make a new communicator for objectives, since one may have left messages in the old one; collective."""
        SleepingComm(self.comm).Free()
        self.comm = self._lend(self.comm.patience)

    def free(self) -> None:
        """Free the communicators of a group that has been left; collective."""
        SleepingComm(self.comm).Free()
        self.own_comm.Free()

    def _lend(self, patience: float) -> LentComm:
        comm = LentComm(self.own_comm.copy())
        comm.patience = patience
        return comm


def _group() -> Any:
    """Return the default process group, as Any: torch's types lack most of its methods."""
    return dist.group.WORLD


def _address(comm: SleepingComm) -> str:
    """Return the leader's address as its peers on other hosts reach it; collective."""
    hosts = comm.allgather(socket.gethostname())
    peer = next((host for host in hosts if host != hosts[0]), hosts[0])
    address: str = comm.bcast(address_towards(peer) if comm.rank == 0 else None)
    return address
