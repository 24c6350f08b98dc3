"""A trainer's part in its worker: its rank, devices and process group."""

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

from hpo.text import message
from hpo.trainer.collectives import Check, is_always_compared, without_own_check
from hpo.trainer.comm import Comm
from hpo.trainer.process_group import own_group
from hpo.trainer.worker import Calls, Worker, seed_torch

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LIMIT = timedelta(minutes=5)  # to connect


class Group:
    """The ranks of a worker as one trainer knows them, and their torch process group."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.index = 0
        self.devices: tuple[torch.device, ...] = (torch.device("cpu"),)
        self.comm = Comm(0, 1)
        self._check: Check | None = None

    @property
    def is_clean(self) -> bool:
        """Whether nothing was changed in the process group, and all messages were received."""
        return own_group.is_whole and not self.comm.has_unreceived

    def join(self, ticket: Mapping[str, Any]) -> None:
        """Make the process group, in the place of the one before; collective over the worker's ranks.

        `ticket` is what `hpo.evaluation.group.Group` has written. Raises RuntimeError if the ranks cannot connect.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        self.rank, self.size, self.index = ticket["rank"], ticket["size"], ticket["index"]
        os.environ.update(ticket["environment"])
        self._take_devices(ticket["devices"])
        timeout = timedelta(seconds=ticket["timeout"])
        own_group.rank, own_group.size, own_group.backend = self.rank, self.size, ticket["backend"]
        own_group.timeout = max(timeout, _LIMIT)
        self._check = None
        try:
            own_group.store = self._open_store(ticket)
            with without_own_check():
                own_group.make(self.devices[0])
            own_group.timeout = timeout
            _default_group()._get_backend(self.devices[0])._set_default_timeout(timeout)
            self.comm = Comm(self.rank, self.size)
            self.comm.connect()
        except RuntimeError as error:  # torch's own errors among them
            raise self._not_connected(error) from error

    def compare_collectives(self, is_compared: bool) -> None:
        """Compare the collectives of the worker's ranks from now on, or no longer; collective over the ranks.

        TORCH_DISTRIBUTED_DEBUG=DETAIL asks for it always. Raises RuntimeError if the ranks cannot connect.
        """
        if self.size > 1 and (is_compared or is_always_compared()):
            assert own_group.store is not None
            try:
                self._check = self._check or Check(
                    _default_group(), self.devices[0], own_group.store, own_group.timeout
                )
            except RuntimeError as error:
                raise self._not_connected(error) from error
            self._check.begin()
        elif self._check is not None:
            self._check.end()

    def _not_connected(self, error: RuntimeError) -> RuntimeError:
        name = os.environ.get(_INTERFACE)
        hint = f" ({_INTERFACE}={name})" if name else ""
        return RuntimeError(f"cannot connect to its peers{hint}: {message(error)}")

    def worker(self, seed: int, calls: Calls) -> Worker:
        """Return the worker as one objective sees it, and seed all random numbers with `seed`."""
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        own_group.begin()
        return Worker(self.rank, self.size, self.devices, seed, self.comm, self.index, calls)

    def _open_store(self, ticket: Mapping[str, Any]) -> Store:
        """Open the store through which the worker's ranks find each other.

        On one host, it is a file: torch's TCPStore asks the name service for the name of each address, even of
        127.0.0.1, which takes 5 s and more if no answer comes, as on compute nodes without a network.
        """
        if self.size == 1:
            return HashStore()
        if ticket["file"]:
            return FileStore(ticket["file"], self.size)
        address, port = ticket["address"]
        store = TCPStore(address, port, is_master=False, timeout=_LIMIT)
        return PrefixStore(ticket["name"], store)

    def _take_devices(self, numbers: list[int]) -> None:
        self.devices = tuple(torch.device("cuda", number) for number in numbers) or (torch.device("cpu"),)
        if numbers:
            torch.cuda.set_device(self.devices[0])


def find_gpus() -> list[str]:
    """Return what identifies each GPU that this process sees."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def serve_store(address: str, port: int, listener: int) -> TCPStore:
    """Serve torch's store on a port that another process listens to, as torchrun's agent does."""
    with suppress(RuntimeError):
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, timeout=_LIMIT
        )
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=False)


def _default_group() -> Any:
    """Return the default process group, as Any: torch's types lack most of its methods."""
    return dist.group.WORLD
