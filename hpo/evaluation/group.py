"""The ranks of a worker, on each of them: an MPI subcommunicator and a torch process group that is renewed."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpo.errors import RunError
from hpo.evaluation.collectives import Check, always_checked, never_checked, without_torchs_check
from hpo.evaluation.connections import Connections
from hpo.evaluation.network import address_towards, interface_towards
from hpo.evaluation.rendezvous import Rendezvous
from hpo.evaluation.subgroups import Subgroups
from hpo.evaluation.worker import Worker
from hpo.layout import usable_cores
from hpo.process.deferred import defer
from hpo.process.descriptors import Reserve
from hpo.ranks.communicator import LentComm, SleepingComm
from hpo.text import message

# What torch asks of its compiler though nothing is compiled (torch 2.14 and 2.15): optimizers ask it to leave them out,
# DistributedDataParallel whether it splits its graphs, init_process_group that it forgets what it knew. Whatever else
# is asked of it imports it, torch.compile first of all. That takes 0.8 s of CPU on every rank and opens 600 files.
defer(
    "torch._dynamo",
    disable=lambda function, *_, **__: function,
    graph_break=lambda: None,
    trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)

_LOOPBACK = "127.0.0.1"
_LIMIT = timedelta(minutes=5)  # to connect
_SECONDS_OF_A_DEATH = 5.0  # until MPI has ended the job of a rank that has died


class Group:
    """The ranks of a worker: their communicators, this rank's device, and their torch process group.

    Made by all of them together, of `comm`, their subcommunicator; `host` are all ranks on this rank's host, and
    `index` the worker's number in the run. Collectives are checked until the group is trusted.
    """

    def __init__(
        self,
        comm: SleepingComm,
        host: SleepingComm,
        index: int,
        collective_timeout: float,
    ) -> None:
        self.own_comm = comm  # for what they do between objectives
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.device = _device(host.rank)
        self.index = index
        self.comm = self._lend(collective_timeout)
        self._on_one_host = MPI.Group.Intersection(comm.group, host.group).size == comm.size
        self._backend = _backend(comm, self.device)
        self._collective_timeout = timedelta(seconds=collective_timeout)
        self._connections = Connections()
        self._subgroups = Subgroups(self._collective_timeout)
        self.descriptors = Reserve()
        self._is_cut = False
        self._store: Rendezvous | None = None
        self._groups = 0
        self._check: Check | None = None
        self._is_trusted = never_checked()
        cores_of_ranks = host.allgather(usable_cores())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_threads(cores_of_ranks, host.rank))
        keep_freed_memory()

    def __enter__(self) -> Group:
        # What is there now stays: without it, looking for garbage is quick.
        gc.freeze()
        gc.enable()
        self._subgroups.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()
        self._subgroups.__exit__()
        gc.unfreeze()

    @property
    def patience(self) -> float:
        """The seconds for which ranks wait for each other."""
        return self._collective_timeout.total_seconds()

    def worker(
        self, seed: int, data: Callable[[], Any] = lambda: None, offer: Callable[[Any], object] = lambda _: None
    ) -> Worker:
        """Make what one objective sees of these ranks; random numbers begin at `seed`.

        `data` is called when it asks for them, and `offer` when it offers weights.
        """
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return Worker(self.rank, self.size, self.device, seed, self.comm, self.index, data, offer)

    def connect(self, alone: AbstractContextManager[object] | None = None) -> None:
        """Bring up the process group, unless it is up and whole on all ranks; collective.

        While `alone` is entered, no other thread of this process opens connections.
        """
        if all(self.own_comm.allgather(dist.is_initialized() and not self._is_cut and self._connections.are_whole)):
            return
        self.disconnect()
        if self._store is None:
            self._store = self._open_store()
        self._groups += 1
        self._store.patience = _LIMIT.total_seconds()
        store = PrefixStore(f"{self._groups}", self._store)
        with alone or nullcontext(), self._connections.opening():
            with self._connecting(), without_torchs_check():
                dist.init_process_group(
                    self._backend, store=store, rank=self.rank, world_size=self.size, timeout=_LIMIT
                )
            self._store.patience = self._collective_timeout.total_seconds()
            _group()._get_backend(self.device)._set_default_timeout(self._collective_timeout)
            if self._is_to_be_checked():
                with suppress(RuntimeError):  # they could not connect in so short a time
                    self._check = Check(_group(), self.device, store, self._collective_timeout)
        # They wait for each other: an objective that fails at once ends its connections, which peers that still connect
        # would take for a crash.
        if all(self.own_comm.allgather(self._check is not None)) and self._check is not None:
            self._check.begin()

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Raise RunError where this rank cannot connect to its peers, while they may go on to try."""
        try:
            yield
        except RuntimeError as error:  # torch's own errors among them
            # Where a peer has died, MPI ends the job meanwhile, and it is not for this rank to explain.
            time.sleep(_SECONDS_OF_A_DEATH)
            name = os.environ.get("GLOO_SOCKET_IFNAME")
            hint = f" (GLOO_SOCKET_IFNAME={name})" if name else ""
            text = f"rank {self.rank} of worker {self.index} cannot connect to its peers{hint}: {message(error)}"
            raise RunError(text) from error

    def trust(self) -> None:
        """Check collectives no more: all ranks have agreed on a loss, and mistakes in the code have shown by then."""
        self._is_trusted = True
        if self._check is not None and not always_checked():
            self._check.end()
            self._check = None

    def _is_to_be_checked(self) -> bool:
        """Tell whether a mistake is looked for: nccl, with which it does not end the process, waits until asked."""
        return self.size > 1 and (always_checked() or (self._backend == "gloo" and not self._is_trusted))

    def _open_store(self) -> Rendezvous:
        """Open the store through which the ranks of all process groups of this worker find each other; collective.

        The leader's listens on a port that the system chose: no port arithmetic, no clash with another run. One serves
        for all groups: torch asks the name service for the name of whatever it connects to, of 127.0.0.1 too, which
        takes 5 s and more where no answer comes, as on compute nodes without a network.
        """
        address = _LOOPBACK if self._on_one_host else _address(self.own_comm)
        interface = interface_towards(address)
        if interface and not os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        store = None
        if self.rank == 0:
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)
        port = self.own_comm.bcast(store.port if store else None)
        with self._connecting():
            store = store or TCPStore(address, port, is_master=False, timeout=_LIMIT)
        self.own_comm.barrier()  # the leader has all of its ends, which are none of a group's connections
        return Rendezvous(store)

    def cut(self) -> None:
        """Fail the collectives that this rank waits in, now and from now on; any thread. Its peers go on to wait.

        Destroying the process group would not do: gloo closes connections only when nothing holds the group any more,
        and models, exceptions and whatever an objective keeps do.
        """
        self._is_cut = True
        self.descriptors.take_back()
        self._subgroups.abort()
        self._connections.cut()

    def disconnect(self) -> None:
        """Take this rank out of its process group, and free what evaluations have left."""
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
        """Leave nothing of the process groups that an evaluation has made, which has ended on all ranks."""
        self._subgroups.destroy()

    def renew_comm(self) -> None:
        """Make another communicator for objectives, after one has left what nobody receives; collective."""
        SleepingComm(self.comm).Free()
        self.comm = self._lend(self.comm.patience)

    def _lend(self, patience: float) -> LentComm:
        comm = LentComm(self.own_comm.copy())
        comm.patience = patience
        return comm


def _group() -> Any:
    """Return the default process group, of which torch's types know little."""
    return dist.group.WORLD


def _device(place: int) -> torch.device:
    """Choose the device of the rank that is number `place` on its host."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(comm: SleepingComm, device: torch.device) -> str:
    """Choose nccl where every rank has a GPU of its own, as it insists on; else gloo, which takes CUDA tensors too."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    gpus = comm.allgather(gpu)
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def _threads(cores_of_ranks: list[list[int]], rank: int) -> int:
    """Return how many of its cores a rank may use, from the cores that each rank on the host may use.

    A core that only one rank may use, as where mpirun or SLURM binds ranks to cores, belongs to it whole.
    """
    ranks_on_core = Counter(core for cores in cores_of_ranks for core in cores)
    return max(1, int(sum(1 / ranks_on_core[core] for core in cores_of_ranks[rank]) + 1e-9))


def _address(comm: SleepingComm) -> str:
    """Return the leader's address as its peers on other hosts reach it; collective."""
    hosts = comm.allgather(socket.gethostname())
    peer = next((host for host in hosts if host != hosts[0]), hosts[0])
    address: str = comm.bcast(address_towards(peer) if comm.rank == 0 else None)
    return address


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, so that each training step does not ask the system for pages again.

    Measured at 8 ranks on 2 cores: system time of 16 trainings 3.5 s -> 0.5 s.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; 32 MiB is the most that glibc takes
