"""Comparing the collectives of ranks before they begin, so that ranks whose collectives differ raise an error.

Otherwise gloo ends the process, from a thread of its own and without a message, if the ranks of a process group call
collectives of different sizes or in different numbers. torch's own wrapper exchanges the next collective of each rank,
and raises if they differ. It costs 2 to 4 ms a collective on busy cores, where an all_reduce of a small tensor takes
0.5 ms (2 ranks, torch 2.15).

torch wraps process groups itself with TORCH_DISTRIBUTED_DEBUG=DETAIL, but DistributedDataParallel crashes in such a
group of gloo: its logger takes the wrapper for gloo (torch 2.15). Here, the wrapper is registered as another backend.
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
    """Compares the collectives of a process group from `begin` to `end`; made by all ranks of the group together.

    A rank that waits for another for longer than `timeout` raises RuntimeError, also while the ranks connect.
    """

    def __init__(self, group: Any, device: torch.device, store: Store, timeout: timedelta) -> None:
        self._group = group
        self._devices = list(group._device_types)
        self._unchecked_backend = group._get_backend(device)
        kinds = dist.ProcessGroup.BackendType
        self._backend_type = kinds.NCCL if dist.get_backend() == "nccl" else kinds.GLOO
        # All ranks but the first wait for as long as the helper was made with; this cannot be changed later.
        helper = ProcessGroupGloo(PrefixStore("check", store), group.rank(), group.size(), timeout=timeout)
        wrapper: Any = _ProcessGroupWrapper(self._unchecked_backend, helper)
        wrapper._set_group_uid(group.group_name)  # functional collectives look their group up by it
        self._checked_backend = wrapper

    def begin(self) -> None:
        """Compare collectives from now on."""
        self._set_backend(dist.ProcessGroup.BackendType.CUSTOM, self._checked_backend)

    def end(self) -> None:
        """Compare collectives no longer, not even those of models that hold the group."""
        self._set_backend(self._backend_type, self._unchecked_backend)

    def _set_backend(self, kind: Any, backend: Any) -> None:
        for device in self._devices:
            self._group._register_backend(device, kind, backend)


def is_check_always_on() -> bool:
    """Tell whether the user asks for a check of all collectives, by torch's own environment variable."""
    return bool(get_debug_level() == DebugLevel.DETAIL)


@contextmanager
def disable_torch_check() -> Iterator[None]:
    """Keep torch from wrapping process groups itself that are made inside ``with``."""
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)
