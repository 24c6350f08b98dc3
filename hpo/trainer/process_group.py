"""`torch.distributed.init_process_group` as objectives see it: the worker's process group is up before they are called.

Code that is written for torchrun makes the group itself. It gets the one that is up, if it asks for nothing else;
otherwise its own group replaces that one.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_make_group = dist.init_process_group


class OwnGroup:
    """What this trainer knows of the default process group: the backend, the store and how often it was asked for."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.rank = self.size = 0
        self.backend = ""
        self.timeout = timedelta(minutes=10)
        self._made: Any = None
        self._is_taken = False
        self._replaced = 0

    def make(self, device: Any) -> None:
        """Make the worker's process group; collective. Raises RuntimeError if the ranks cannot connect."""
        assert self.store is not None
        _make_group(
            self.backend,
            store=PrefixStore("worker", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            # nccl would have to guess the device of a collective without a tensor, and groups of some ranks are split
            # from a group that knows it.
            device_id=device if self.backend == "nccl" else None,
        )
        self._made, self._is_taken = dist.group.WORLD, False

    def begin(self) -> None:
        """Let an evaluation ask for the group that is up."""
        self._is_taken = False

    @property
    def is_whole(self) -> bool:
        """Whether the group that `make` has made is the default one, and the only one."""
        groups = dist.distributed_c10d._world.pg_map
        return dist.is_initialized() and dist.group.WORLD is self._made and len(groups) == 1

    def init(self, backend: str | None = None, init_method: str | None = None, *arguments: Any, **options: Any) -> None:
        """Do what `torch.distributed.init_process_group` does, for an objective."""
        own = self.store is not None and not arguments and not set(options) - {"timeout", "device_id", "pg_options"}
        own = own and init_method in (None, "env://") and options.get("rank", self.rank) in (-1, self.rank)
        if own and dist.is_initialized() and not self._is_taken and _is_same(backend, self.backend):
            self._is_taken = True
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if own:
            assert self.store is not None
            self._replaced += 1
            store = PrefixStore(f"replaced/{self._replaced}", self.store)
            options = {"timeout": self.timeout, **options}
            _make_group(backend, store=store, rank=self.rank, world_size=self.size, **options)
        else:
            _make_group(backend, init_method, *arguments, **options)
        self._is_taken = True


own_group = OwnGroup()


def replace_init() -> None:
    """Let `torch.distributed.init_process_group` be this module's, before a search file imports it."""

    @functools.wraps(_make_group)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        own_group.init(*arguments, **options)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _is_same(backend: str | None, own: str) -> bool:
    """Tell whether a backend that is asked for is the one that is up; one may be named for each type of device."""
    if backend is None:
        return True
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return names == {own} or backend.lower() == "undefined"
