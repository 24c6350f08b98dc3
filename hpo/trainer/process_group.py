"""Replace `torch.distributed.init_process_group`, which code for torchrun calls in an objective.

The process group of the worker exists before the objective starts. The replacement keeps this group
if it has the requested backend and ranks. Otherwise, it makes a new group instead.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

_init_process_group = dist.init_process_group


class DefaultGroup:
    """The default process group of this trainer.

    It counts how often the objective has replaced the group.
    """

    def __init__(self) -> None:
        self.store: Store | None = None
        self.rank = self.size = 0
        self.backend = ""
        self.timeout = timedelta(minutes=10)
        self._made_group: Any = None
        self._is_requested = False
        self._replacement_count = 0

    def make_process_group(self, device: torch.device) -> None:
        """Make the worker's process group. Collective: call on all ranks.

        Raises RuntimeError if the ranks cannot connect.
        """
        assert self.store is not None
        _init_process_group(
            self.backend,
            store=PrefixStore("worker", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=self.timeout,
            # With a device, nccl need not guess it for collectives without a tensor, and can split the group.
            device_id=device if self.backend != "gloo" else None,
        )
        if self.backend != "gloo":
            self._add_gloo()
        self._made_group, self._is_requested = dist.group.WORLD, False

    def _add_gloo(self) -> None:
        """Let the group use gloo for tensors on the CPU, as torch's default group does.

        The name of the group's backend remains "nccl", for scripts that compare it.
        """
        group: Any = dist.group.WORLD
        gloo: Any = ProcessGroupGloo(PrefixStore("cpu", self.store), self.rank, self.size, timeout=self.timeout)  # type: ignore[arg-type]
        gloo._set_group_uid(group.group_name)  # Functional collectives find their group by this name.
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the maximum time for which a collective of the worker's group waits for other ranks."""
        self.timeout = timeout
        # Before torch 2.15, the function had another name.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout)

    def begin_evaluation(self) -> None:
        """Let the next call of `init_process_group` keep the existing group, if backend and ranks match."""
        self._is_requested = False

    @property
    def is_unchanged(self) -> bool:
        """Whether the default group is still the result of `make_process_group`, and no other group exists."""
        groups = dist.distributed_c10d._world.pg_map
        return dist.is_initialized() and dist.group.WORLD is self._made_group and len(groups) == 1

    def handle_init(
        self, backend: str | None = None, init_method: str | None = None, *arguments: Any, **options: Any
    ) -> None:
        """Keep or replace the default group when an objective calls `torch.distributed.init_process_group`.

        The arguments are those of torch's function.
        """
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
    """Replace `torch.distributed.init_process_group`; call it before a search file imports that function."""

    @functools.wraps(_init_process_group)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        default_group.handle_init(*arguments, **options)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _is_same_backend(backend: str | None, own: str) -> bool:
    """Return whether the requested `backend` is the existing one, `own`.

    A requested backend may be a list with one backend for each type of device.
    """
    if backend is None:
        return True
    parts = str(backend).lower().split(",")
    names = {part.rpartition(":")[2] for part in parts if not part.startswith("cpu:")}
    return names <= {own, "undefined"}
