"""Workers: the ranks that evaluate one individual together, as an MPI subcommunicator and a torch process group."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hpo.communicator import SleepingComm
from hpo.deferred import defer
from hpo.layout import usable_cores
from hpo.network import address_towards, interface_towards, open_sockets, stop_receiving
from hpo.options import DEFAULT_COLLECTIVE_TIMEOUT

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


class Worker:
    """The ranks that evaluate one individual together; what an objective sees of the run.

    While an objective runs, torch.distributed's default process group spans exactly these ranks. A rank that waits for
    its peers in a collective for `--collective-timeout` gives up with an error.

    ::

        def objective(params, worker):
            loss = train(params, worker.data, worker.device, share=(worker.rank, worker.size))
            torch.distributed.all_reduce(loss)  # over the worker's ranks
            return loss.item() / worker.size
    """

    rank: int
    """This rank's number in the worker, from 0, the leader."""
    size: int
    """The number of ranks in the worker."""
    device: torch.device
    """The `torch.device` that this rank computes on."""
    seed: int
    """The seed of weights and order: the run's, or another one where an individual is confirmed."""
    data: Any
    """What the search space's `prepare` returned; None without one."""
    comm: SleepingComm
    """An MPI communicator of the worker's ranks, for objectives."""
    index: int
    """The worker's number in the run."""

    def __init__(
        self,
        comm: SleepingComm,
        host: SleepingComm,
        index: int,
        seed: int,
        data: Any = None,
        collective_timeout: float = DEFAULT_COLLECTIVE_TIMEOUT,
    ) -> None:
        self.own_comm = comm  # for what they do between objectives
        self.rank = comm.rank
        self.size = comm.size
        self.device = _device(host.rank)
        self.seed = seed
        self.data = data
        self.comm = comm.copy()
        self.index = index
        self.offered: Mapping[str, torch.Tensor] | None = None
        self._on_one_host = MPI.Group.Intersection(comm.group, host.group).size == comm.size
        self._backend = _backend(comm, self.device)
        self._collective_timeout = timedelta(seconds=collective_timeout)
        self._connections: Mapping[int, int] = {}
        self._held: list[socket.socket] = []
        self._is_cut = False
        self._store: TCPStore | None = None
        self._groups = 0
        cores_of_ranks = host.allgather(usable_cores())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_threads(cores_of_ranks, host.rank))
        keep_freed_memory()

    def __enter__(self) -> Worker:
        # What is there now stays: without it, looking for garbage is quick.
        gc.freeze()
        gc.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.disconnect()
        gc.unfreeze()

    def connect(self, alone: AbstractContextManager[object] | None = None) -> None:
        """Bring up the worker's process group, unless it is up on all ranks; collective over the worker.

        While `alone` is entered, no other thread of this process opens connections.
        """
        if all(self.own_comm.allgather(dist.is_initialized() and not self._is_cut)):
            return
        self.disconnect()
        if self._store is None:
            self._store = self._open_store()
        self._groups += 1
        store = PrefixStore(f"{self._groups}", self._store)
        with alone or nullcontext():
            before = open_sockets()
            dist.init_process_group(self._backend, store=store, rank=self.rank, world_size=self.size, timeout=_LIMIT)
            self._connections = {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}
        _group()._get_backend(self.device)._set_default_timeout(self._collective_timeout)
        # An objective that fails at once ends its connections, which peers that still connect would take for a crash.
        self.own_comm.barrier()

    def _open_store(self) -> TCPStore:
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
        store = store or TCPStore(address, port, is_master=False, timeout=_LIMIT)
        self.own_comm.barrier()  # the leader has all of its ends, which are none of a group's connections
        return store

    def cut(self) -> None:
        """Fail the collectives that this rank waits in, now and from now on; any thread. Its peers go on to wait.

        Destroying the process group would not do: gloo closes connections only when nothing holds the group any more,
        and models, exceptions and whatever an objective keeps do.
        """
        self._is_cut = True
        with suppress(Exception):  # there is no group any more, or it cannot be aborted
            _group().abort()  # for nccl; gloo's does nothing
        self._held += stop_receiving(self._connections)

    def disconnect(self) -> None:
        """Take this rank out of its process group, and free what evaluations have left."""
        self._held += stop_receiving(self._connections)
        self._connections = {}
        if dist.is_initialized():
            dist.destroy_process_group()
        while self._held:
            self._held.pop().close()
        self._is_cut = False
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def renew_comm(self) -> None:
        """Give objectives another communicator, after one has left what nobody receives; collective over the worker."""
        self.comm.Free()
        self.comm = self.own_comm.copy()

    def offer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Offer the weights that have the loss which an objective is about to yield, as its network's `state_dict()`.

        Those of the run's best are kept in RUN_DIR/best.safetensors. Only the leader's are looked at; they are copied
        there if the loss is the best of the run so far, and the network may train on after the yield.
        """
        for name, tensor in dict(weights).items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise TypeError(f"worker.offer takes a dict of tensors by their names, not {name!r}: {type(tensor)}")
        self.offered = weights

    def seed_everything(self) -> None:
        """Seed torch, numpy and random alike on all ranks, so that an evaluation follows from its hyperparameters."""
        torch.manual_seed(self.seed)
        np.random.seed(self.seed % 2**32)
        random.seed(self.seed)


def _group() -> Any:
    """Give the default process group, of which torch's types know little."""
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
    """Give a rank its share of the cores it may use, given the cores that each rank on the host may use.

    A core that only one rank may use, as where mpirun or SLURM binds ranks to cores, belongs to it whole.
    """
    ranks_on_core = Counter(core for cores in cores_of_ranks for core in cores)
    return max(1, int(sum(1 / ranks_on_core[core] for core in cores_of_ranks[rank]) + 1e-9))


def _address(comm: SleepingComm) -> str:
    """Give the leader's address as its peers on other hosts reach it; collective."""
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
