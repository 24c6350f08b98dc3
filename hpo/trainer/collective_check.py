"""Compare the collectives of all ranks before each one begins, and raise an error if they differ.

A collective is a call that all ranks must make together, such as all_reduce. If the ranks call collectives of different
sizes or in different numbers, gloo ends the process without a message. torch's wrapper of process groups prevents this:
the ranks exchange a description of the next collective, and raise an error if the descriptions differ. This takes 2 to
4 ms per collective on busy cores; an all_reduce of a small tensor takes 0.5 ms (2 ranks, torch 2.15).

With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch itself wraps all process groups. DistributedDataParallel crashes in such a
group of gloo, because its logger mistakes the wrapper for gloo (torch 2.15). To avoid the crash, this module registers
the wrapper as another backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    Store,
    get_debug_level,
    set_debug_level,
)
from torch.distributed.distributed_c10d import ProcessGroupGloo


class CollectiveCheck:
    """Compares the collectives of a process group from `begin` to `end`. Collective: construct it on all ranks.

    A rank raises RuntimeError if it waits for other ranks longer than `timeout`. This also holds in the constructor, in
    which the ranks connect.
    """

    def __init__(self, group: Any, device: torch.device, store: Store, timeout: timedelta) -> None:
        self._group = group
        self._devices = list(group._device_types)
        self._unchecked_backend = group._get_backend(device)
        kinds = dist.ProcessGroup.BackendType
        self._backend_type = kinds.NCCL if dist.get_backend() == "nccl" else kinds.GLOO
        # All ranks except the first wait for the timeout of the helper, which cannot be changed later.
        helper = ProcessGroupGloo(PrefixStore("check", store), group.rank(), group.size(), timeout=timeout)
        wrapper: Any = _ProcessGroupWrapper(self._unchecked_backend, helper)
        wrapper._set_group_uid(group.group_name)  # Functional collectives find their group by this name.
        self._checked_backend = wrapper

    def begin(self) -> None:
        """Compare all collectives until `end` is called."""
        self._set_backend(dist.ProcessGroup.BackendType.CUSTOM, self._checked_backend)

    def end(self) -> None:
        """Stop comparing collectives. This also applies to models that already use the group."""
        self._set_backend(self._backend_type, self._unchecked_backend)

    def _set_backend(self, kind: Any, backend: Any) -> None:
        for device in self._devices:
            self._group._register_backend(device, kind, backend)


def is_check_always_on() -> bool:
    """Return whether the user has set TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch checks all collectives."""
    return bool(get_debug_level() == DebugLevel.DETAIL)


@contextmanager
def disable_torch_check() -> Iterator[None]:
    """Return a context in which torch adds no check of collectives to new process groups."""
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)
