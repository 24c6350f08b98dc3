"""Compare the collectives of all ranks before they begin, and raise an error if they differ.

Without it, gloo ends the process from one of its threads and without a message if the ranks call collectives of
different sizes or in different numbers. torch's wrapper of process groups exchanges the next collective of each rank,
and raises if they differ. This takes 2 to 4 ms per collective on busy cores; an all_reduce of a small tensor takes
0.5 ms (2 ranks, torch 2.15).

torch wraps process groups itself with TORCH_DISTRIBUTED_DEBUG=DETAIL. DistributedDataParallel crashes in such a group
of gloo, because its logger mistakes the wrapper for gloo (torch 2.15). Here, the wrapper is registered as another
backend.
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

    A rank that waits for its peers for longer than `timeout` raises RuntimeError, also while the ranks connect.
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
        """Compare collectives from now on."""
        self._set_backend(dist.ProcessGroup.BackendType.CUSTOM, self._checked_backend)

    def end(self) -> None:
        """Stop comparing collectives, also for models that hold the group."""
        self._set_backend(self._backend_type, self._unchecked_backend)

    def _set_backend(self, kind: Any, backend: Any) -> None:
        for device in self._devices:
            self._group._register_backend(device, kind, backend)


def is_check_always_on() -> bool:
    """Return whether the user has enabled the check of all collectives by torch's environment variable."""
    return bool(get_debug_level() == DebugLevel.DETAIL)


@contextmanager
def disable_torch_check() -> Iterator[None]:
    """Return a context in which torch does not wrap new process groups."""
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)
