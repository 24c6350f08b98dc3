"""The rank, the devices and the process group of a trainer in its worker.

The process group of the worker exists before the objective starts. Code for torchrun calls
`torch.distributed.init_process_group` itself, so that function is replaced (see
`TrainerGroup.handle_init`).
"""

from __future__ import annotations

import functools
import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    get_debug_level,
    set_debug_level,
)
from torch.distributed.distributed_c10d import ProcessGroupGloo

from hpo.process.messages import GroupTicket
from hpo.text_format import format_error
from hpo.trainer.accelerator import DeviceMemory, find_accelerator_in_use, select_device
from hpo.trainer.report_exchange import ReportExchange
from hpo.trainer.worker import Comm, Worker

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
CONNECT_TIMEOUT = timedelta(minutes=5)
_init_process_group = dist.init_process_group


class TrainerGroup:
    """The rank and devices of one trainer in its worker, and the default process group of torch.

    If the objective calls `torch.distributed.init_process_group`, the group is kept if it has the
    requested backend and ranks. Otherwise, a new group replaces it.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.index = 0
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.memory = DeviceMemory(self.devices[0])
        self.comm = Comm(0, 1)
        self.exchange = ReportExchange(HashStore(), 0, 1, "", 0.0, 0.0)
        self.timeout = timedelta(minutes=10)
        self.store: Store | None = None
        self._backend = ""
        self._check: CollectiveCheck | None = None
        self._made_group: Any = None
        self._is_requested = False
        self._replacement_count = 0

    @property
    def is_clean(self) -> bool:
        """Whether the process group is unchanged, and all sent objects were received."""
        groups = dist.distributed_c10d._world.pg_map
        is_unchanged = dist.is_initialized() and dist.group.WORLD is self._made_group
        return is_unchanged and len(groups) == 1 and not self.comm.has_pending_sends

    def join(self, ticket: GroupTicket) -> None:
        """Make the worker's process group. Collective: call on all ranks, once in each trainer.

        Raises RuntimeError if the ranks cannot connect.
        """
        global _joined_group
        _joined_group = self
        self.rank = ticket.rank
        self.size = ticket.size
        self.index = ticket.index
        self._backend = ticket.backend
        os.environ.update(ticket.environment)
        self.devices = select_device(ticket.devices)
        self.memory = DeviceMemory(self.devices[0])
        self.timeout = max(timedelta(seconds=ticket.timeout), CONNECT_TIMEOUT)
        try:
            self.store = _open_store(ticket)
            level = get_debug_level()
            set_debug_level(DebugLevel.OFF)  # torch must not add a check of collectives of its own.
            try:
                self._make_process_group(self.store)
            finally:
                set_debug_level(level)
            # A collective waits for other ranks for another time than a connection.
            self.timeout = timedelta(seconds=ticket.timeout)
            # Before torch 2.15, the function had another name.
            set_timeout = (
                getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            )
            set_timeout(self.timeout)
            self.comm = Comm(self.rank, self.size)
            self.exchange = ReportExchange(
                self.store,
                self.rank,
                self.size,
                ticket.address[0],
                CONNECT_TIMEOUT.total_seconds(),
                ticket.timeout,
            )
            # An objective that fails at once would break the connections that its peers are still
            # making.
            self.comm.barrier()
        except RuntimeError as error:  # torch's connection errors are subclasses.
            raise _make_connection_error(error) from error

    def _make_process_group(self, store: Store) -> None:
        _init_process_group(
            self._backend,
            store=PrefixStore("worker", store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            # With a device, nccl need not guess it for collectives without a tensor, and can split
            # the group.
            device_id=self.devices[0] if self._backend != "gloo" else None,
        )
        group: Any = dist.group.WORLD
        if self._backend != "gloo":
            # The group uses gloo for tensors on the CPU, as torch's default group does. The name of
            # the group's backend remains "nccl", for scripts that compare it.
            prefix: Any = PrefixStore("cpu", store)
            gloo: Any = ProcessGroupGloo(prefix, self.rank, self.size, timeout=self.timeout)
            # Functional collectives find their group by this name.
            gloo._set_group_uid(group.group_name)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._made_group = group

    def compare_collectives(self, is_compared: bool) -> None:
        """Enable or disable the check that all ranks call the same collectives.

        Collective: call on all ranks. TORCH_DISTRIBUTED_DEBUG=DETAIL always enables it. Raises
        RuntimeError if the ranks cannot connect.
        """
        if self.size > 1 and (is_compared or get_debug_level() == DebugLevel.DETAIL):
            assert self.store is not None
            try:
                if self._check is None:
                    self._check = CollectiveCheck(dist.group.WORLD, self.store, self.timeout)
            except RuntimeError as error:
                raise _make_connection_error(error) from error
            self._check.begin()
        elif self._check is not None:
            self._check.end()

    def make_worker(self, seed: int, **evaluation: Any) -> Worker:
        """Make the `Worker` of one evaluation, and seed all random generators with `seed`.

        `evaluation` has the other fields of the `Worker`.
        """
        # torch.manual_seed also queues a call for each type of device that is missing. Each queued
        # call takes 1 ms, and the queue grows.
        torch.default_generator.manual_seed(seed)
        if (accelerator := find_accelerator_in_use()) is not None:
            accelerator.manual_seed_all(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._is_requested = False
        return Worker(self.rank, self.size, self.devices, seed, self.comm, self.index, **evaluation)

    def handle_init(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Keep or replace the default group when an objective calls torch's `init_process_group`.

        The arguments are those of torch's function.
        """
        is_usual = not arguments and not options.keys() - {"timeout", "device_id", "pg_options"}
        is_own = is_usual and self.store is not None and init_method in (None, "env://")
        # A requested backend may be a list with one backend for each type of device.
        parts = str(backend or self._backend).lower().split(",")
        names = {part.rpartition(":")[2] for part in parts if not part.startswith("cpu:")}
        is_same = names <= {self._backend, "undefined"}
        is_kept = is_own and not self._is_requested and is_same
        self._is_requested = True
        if dist.is_initialized():
            if is_kept:
                return
            dist.destroy_process_group()
        if not is_own:
            _init_process_group(backend, init_method, *arguments, **options)
            return
        assert self.store is not None
        self._replacement_count += 1
        store = PrefixStore(f"replaced/{self._replacement_count}", self.store)
        options = {"timeout": self.timeout, **options}
        _init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **options)


# The group of this trainer, if it has joined one.
_joined_group = TrainerGroup()


def _make_connection_error(error: RuntimeError) -> RuntimeError:
    name = os.environ.get(_INTERFACE_VARIABLE)
    hint = f" ({_INTERFACE_VARIABLE}={name})" if name else ""
    return RuntimeError(f"cannot connect to its peers{hint}: {format_error(error)}")


def _open_store(ticket: GroupTicket) -> Store:
    """Open the store of torch through which the worker's ranks find each other.

    On one host, the store is a file, since a TCPStore may be slow. For each address, even
    127.0.0.1, torch asks the name service for a name. Without an answer, as on compute nodes
    without a network, this takes 5 s or more.
    """
    if ticket.size == 1:
        return HashStore()
    if ticket.file:
        return FileStore(ticket.file, ticket.size)
    address, port = ticket.address
    store = TCPStore(address, port, is_master=False, timeout=CONNECT_TIMEOUT)
    return PrefixStore(ticket.name, store)


def replace_init_process_group() -> None:
    """Replace torch's `init_process_group`, before a search file imports it."""

    @functools.wraps(_init_process_group)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        _joined_group.handle_init(*arguments, **options)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def register_gloo() -> None:
    """Register torch's backend gloo, so that trainers need not do it when they make a group.

    torch 2.15 searches the metadata of all installed packages for a backend at its first use, which
    takes 15 ms of CPU time. Older versions register gloo when they are imported.
    """
    register = getattr(dist.Backend, "_ensure_backend_registered", None)
    if register is not None:
        register("gloo")


class CollectiveCheck:
    """Compares the collectives of a process group from `begin` to `end`, and raises if they differ.

    If the ranks call collectives of different sizes or in different numbers, gloo ends the process
    without a message. torch's wrapper of process groups prevents this: the ranks exchange a
    description of the next collective. This takes 2 to 4 ms per collective on busy cores; an
    all_reduce of a small tensor takes 0.5 ms (2 ranks, torch 2.15).

    With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch itself wraps all process groups.
    DistributedDataParallel crashes in such a group of gloo, because its logger mistakes the wrapper
    for gloo (torch 2.15). So the wrapper is registered as another backend here.

    Collective: construct it on all ranks. A rank raises RuntimeError if it waits for other ranks
    longer than `timeout`, also in the constructor, in which the ranks connect.
    """

    def __init__(self, group: Any, store: Store, timeout: timedelta) -> None:
        self._group = group
        self._unchecked = {device: group._get_backend(device) for device in group._device_types}
        # A backend may serve several types of devices, and is wrapped once.
        wrappers: dict[int, Any] = {}
        for device, backend in self._unchecked.items():
            if id(backend) not in wrappers:
                # All ranks except the first wait for the timeout of the helper, which cannot be
                # changed later.
                prefix = PrefixStore(f"check/{device.type}", store)
                helper = ProcessGroupGloo(prefix, group.rank(), group.size(), timeout=timeout)
                wrappers[id(backend)] = _ProcessGroupWrapper(backend, helper)
                # Functional collectives find it by this name.
                wrappers[id(backend)]._set_group_uid(group.group_name)
        self._checked = {
            device: wrappers[id(backend)] for device, backend in self._unchecked.items()
        }

    def begin(self) -> None:
        """Compare all collectives until `end` is called."""
        kinds = dist.ProcessGroup.BackendType
        has_one_backend = len(set(map(id, self._checked.values()))) == 1
        for device, backend in self._checked.items():
            # A group has one backend of each kind. UCC stands for the wrapper of gloo, next to that
            # of nccl.
            is_second = device.type == "cpu" and not has_one_backend
            self._group._register_backend(device, kinds.UCC if is_second else kinds.CUSTOM, backend)

    def end(self) -> None:
        """Stop comparing collectives. This also applies to models that already use the group."""
        kinds = dist.ProcessGroup.BackendType
        of_devices = {"cuda": kinds.NCCL, "xpu": kinds.XCCL}
        for device, backend in self._unchecked.items():
            kind = (
                kinds.GLOO
                if backend.name() == "gloo"
                else of_devices.get(device.type, kinds.CUSTOM)
            )
            self._group._register_backend(device, kind, backend)
