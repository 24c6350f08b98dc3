"""The rank, the devices and the process group of a trainer in its worker."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hpo.text_format import format_error
from hpo.trainer.accelerator import DeviceMemory, select_device
from hpo.trainer.collective_check import CollectiveCheck, disable_torch_check, is_check_always_on
from hpo.trainer.object_comm import Comm
from hpo.trainer.process_group import default_group
from hpo.trainer.report_exchange import ReportExchange
from hpo.trainer.worker import Worker, WorkerCallbacks, seed_torch

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_CONNECT_TIMEOUT = timedelta(minutes=5)


class TrainerGroup:
    """The rank and devices of one trainer in its worker, and the torch process group."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.index = 0
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.memory = DeviceMemory(self.devices[0])
        self.comm = Comm(0, 1)
        self.exchange = ReportExchange(HashStore(), 0, 1, "", 0.0, 0.0)
        self._check: CollectiveCheck | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the process group is unchanged, and all sent objects were received."""
        return default_group.is_unchanged and not self.comm.has_pending_sends

    def join(self, ticket: Mapping[str, Any]) -> None:
        """Make the process group of the worker's ranks. Collective: call on all ranks, once in each trainer.

        `ticket` describes the group, and comes from `hpo.evaluation.rank_group.RankGroup`. Raises RuntimeError if the
        ranks cannot connect.
        """
        self.rank, self.size, self.index = ticket["rank"], ticket["size"], ticket["index"]
        os.environ.update(ticket["environment"])
        self.devices = select_device(ticket["devices"])
        self.memory = DeviceMemory(self.devices[0])
        timeout = timedelta(seconds=ticket["timeout"])
        default_group.rank, default_group.size, default_group.backend = self.rank, self.size, ticket["backend"]
        default_group.timeout = max(timeout, _CONNECT_TIMEOUT)
        try:
            default_group.store = self._open_store(ticket)
            with disable_torch_check():
                default_group.make_process_group(self.devices[0])
            default_group.set_timeout(timeout)
            self.comm = Comm(self.rank, self.size)
            self.exchange = ReportExchange(
                default_group.store,
                self.rank,
                self.size,
                ticket["address"][0],
                _CONNECT_TIMEOUT.total_seconds(),
                ticket["timeout"],
            )
            # An objective that fails at once would break the connections that its peers are still making.
            self.comm.barrier()
        except RuntimeError as error:  # torch's connection errors are subclasses.
            raise self._make_connection_error(error) from error

    def compare_collectives(self, is_compared: bool) -> None:
        """Enable or disable the check that all ranks call the same collectives. Collective: call on all ranks.

        TORCH_DISTRIBUTED_DEBUG=DETAIL always enables it. Raises RuntimeError if the ranks cannot connect.
        """
        if self.size > 1 and (is_compared or is_check_always_on()):
            assert default_group.store is not None
            store, timeout = default_group.store, default_group.timeout
            try:
                self._check = self._check or CollectiveCheck(dist.group.WORLD, store, timeout)
            except RuntimeError as error:
                raise self._make_connection_error(error) from error
            self._check.begin()
        elif self._check is not None:
            self._check.end()

    def _make_connection_error(self, error: RuntimeError) -> RuntimeError:
        name = os.environ.get(_INTERFACE_VARIABLE)
        hint = f" ({_INTERFACE_VARIABLE}={name})" if name else ""
        return RuntimeError(f"cannot connect to its peers{hint}: {format_error(error)}")

    def make_worker(self, seed: int, calls: WorkerCallbacks) -> Worker:
        """Make the `Worker` object for one evaluation, and seed all random generators with `seed`."""
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        default_group.begin_evaluation()
        return Worker(self.rank, self.size, self.devices, seed, self.comm, self.index, calls)

    def _open_store(self, ticket: Mapping[str, Any]) -> Store:
        """Open the store of torch through which the worker's ranks find each other.

        On one host, the store is a file, since a TCPStore may be slow. For each address, even 127.0.0.1, torch asks the
        name service for a name. Without an answer, as on compute nodes without a network, this takes 5 s or more.
        """
        if self.size == 1:
            return HashStore()
        if ticket["file"]:
            return FileStore(ticket["file"], self.size)
        address, port = ticket["address"]
        store = TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT)
        return PrefixStore(ticket["name"], store)


def serve_store(address: str, port: int, listener: int) -> TCPStore:
    """Start the server of a TCPStore on a socket on which another process already listens.

    `listener` is the file descriptor of the socket. The agent of torchrun starts its store in the same way.
    """
    with suppress(RuntimeError):
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, timeout=_CONNECT_TIMEOUT
        )
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=False)
