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

_init_process_group = dist.init_process_group


class DefaultGroup:
    """What this trainer knows of the default process group: the backend, the store and how often it was asked for."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.rank = self.size = 0
        self.backend = ""
        self.timeout = timedelta(minutes=10)
        self._made_group: Any = None
        self._is_requested = False
        self._replacement_count = 0

    def make_process_group(self, device: Any) -> None:
        """Make the worker's process group; collective. Raises RuntimeError if the ranks cannot connect."""
        assert self.store is not None
        _init_process_group(
            self.backend,
            store=PrefixStore("worker", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            # nccl would have to guess the device of a collective without a tensor, and groups of some ranks are split
            # from a group that knows it.
            device_id=device if self.backend == "nccl" else None,
        )
        self._made_group, self._is_requested = dist.group.WORLD, False

    def begin_evaluation(self) -> None:
        """Let an evaluation ask for the group that is up."""
        self._is_requested = False

    @property
    def is_unchanged(self) -> bool:
        """Whether the group that `make` has made is the default one, and the only one."""
        groups = dist.distributed_c10d._world.pg_map
        return dist.is_initialized() and dist.group.WORLD is self._made_group and len(groups) == 1

    def handle_init(
        self, backend: str | None = None, init_method: str | None = None, *arguments: Any, **options: Any
    ) -> None:
        """Do what `torch.distributed.init_process_group` does, for an objective."""
        own = self.store is not None and not arguments and not set(options) - {"timeout", "device_id", "pg_options"}
        own = own and init_method in (None, "env://") and options.get("rank", self.rank) in (-1, self.rank)
        if own and dist.is_initialized() and not self._is_requested and _is_same_backend(backend, self.backend):
            self._is_requested = True
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        if own:
            assert self.store is not None
            self._replacement_count += 1
            store = PrefixStore(f"replaced/{self._replacement_count}", self.store)
            options = {"timeout": self.timeout, **options}
            _init_process_group(backend, store=store, rank=self.rank, world_size=self.size, **options)
        else:
            _init_process_group(backend, init_method, *arguments, **options)
        self._is_requested = True


default_group = DefaultGroup()


def replace_init_process_group() -> None:
    """Let `torch.distributed.init_process_group` be this module's, before a search file imports it."""

    @functools.wraps(_init_process_group)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        default_group.handle_init(*arguments, **options)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _is_same_backend(backend: str | None, own: str) -> bool:
    """Tell whether a backend that is asked for is the one that is up; one may be named for each type of device."""
    if backend is None:
        return True
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    return names == {own} or backend.lower() == "undefined"
