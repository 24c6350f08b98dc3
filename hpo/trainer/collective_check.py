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

    def __init__(self, group: Any, store: Store, timeout: timedelta) -> None:
        self._group = group
        self._unchecked = {device: group._get_backend(device) for device in group._device_types}
        # A backend may serve several types of devices, and is wrapped once.
        wrappers: dict[int, Any] = {}
        for device, backend in self._unchecked.items():
            if id(backend) not in wrappers:
                # All ranks except the first wait for the timeout of the helper, which cannot be changed later.
                prefix = PrefixStore(f"check/{device.type}", store)
                helper = ProcessGroupGloo(prefix, group.rank(), group.size(), timeout=timeout)
                wrappers[id(backend)] = _ProcessGroupWrapper(backend, helper)
                wrappers[id(backend)]._set_group_uid(group.group_name)  # Functional collectives find it by this name.
        self._checked = {device: wrappers[id(backend)] for device, backend in self._unchecked.items()}

    def begin(self) -> None:
        """Compare all collectives until `end` is called."""
        kinds = dist.ProcessGroup.BackendType
        has_one_backend = len(set(map(id, self._checked.values()))) == 1
        for device, backend in self._checked.items():
            # A group has one backend of each kind. UCC stands for the wrapper of gloo, next to that of nccl.
            is_second = device.type == "cpu" and not has_one_backend
            self._group._register_backend(device, kinds.UCC if is_second else kinds.CUSTOM, backend)

    def end(self) -> None:
        """Stop comparing collectives. This also applies to models that already use the group."""
        kinds = dist.ProcessGroup.BackendType
        of_devices = {"cuda": kinds.NCCL, "xpu": kinds.XCCL}
        for device, backend in self._unchecked.items():
            kind = kinds.GLOO if backend.name() == "gloo" else of_devices.get(device.type, kinds.CUSTOM)
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
