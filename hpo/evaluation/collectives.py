"""Comparing the collectives of ranks before they begin, so that ranks whose collectives differ raise an error.

Otherwise gloo ends the process, from a thread of its own and without a message, where the ranks of a process group call
collectives of different sizes or in different numbers. torch's own wrapper exchanges what each rank is about to call,
and raises where that differs. It costs 2 to 4 ms a collective on busy cores, where an all_reduce of a small tensor
takes 0.5 ms (2 ranks, torch 2.15): this is acceptable in a first epoch, in which mistakes in the code show, and too
much for all epochs.
"""

from __future__ import annotations

import os
import re
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

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_CALLED = re.compile(
    r"is running collective: CollectiveFingerPrint\(SequenceNumber=\d+,? ?OpType=(\w+)"
    r"(?:, TensorShape=(\[[^\]]*\]))?(?:, TensorDtypes=(\w+))?"
)


class Check:
    """Compares the collectives of a process group from `begin` to `end`; made by all ranks of the group together.

    A rank that waits for another for longer than `timeout` raises RuntimeError, also while the ranks connect. torch's
    debug level is not used: it would compare all collectives for as long as the group exists.
    """

    def __init__(self, group: Any, device: torch.device, store: Store, timeout: timedelta) -> None:
        self._group = group
        self._devices = list(group._device_types)
        self._plain = group._get_backend(device)
        kinds = dist.ProcessGroup.BackendType
        self._kind = kinds.NCCL if dist.get_backend() == "nccl" else kinds.GLOO
        # All ranks but the first wait for as long as the helper was made with; this cannot be changed later.
        helper = ProcessGroupGloo(PrefixStore("check", store), group.rank(), group.size(), timeout=timeout)
        wrapper: Any = _ProcessGroupWrapper(self._plain, helper)
        wrapper._set_group_uid(group.group_name)  # functional collectives look their group up by it
        self._wrapper = wrapper

    def begin(self) -> None:
        """Compare collectives from now on."""
        self._register(dist.ProcessGroup.BackendType.CUSTOM, self._wrapper)

    def end(self) -> None:
        """Compare collectives no more, not even those of models that hold the group."""
        self._register(self._kind, self._plain)

    def _register(self, kind: Any, backend: Any) -> None:
        for device in self._devices:
            self._group._register_backend(device, kind, backend)


def always_checked() -> bool:
    """Tell whether the user asks for a check of all collectives, by torch's own environment variable."""
    return os.environ.get(_DEBUG, "").upper() == "DETAIL"


def never_checked() -> bool:
    """Tell whether the user asks that no collective is checked."""
    return os.environ.get(_DEBUG, "").upper() == "OFF"


@contextmanager
def without_torchs_check() -> Iterator[None]:
    """Keep torch from wrapping a process group by itself."""
    level, wanted = get_debug_level(), os.environ.pop(_DEBUG, None)
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)
        if wanted is not None:
            os.environ[_DEBUG] = wanted


def collective_of(message: str) -> str:
    """Return the collective that this rank was in, if the message of its error is the check's; else an empty text."""
    called = _CALLED.search(message) if "mismatch between collectives" in message else None
    if called is None:
        return ""
    kind, shape, dtype = called.groups()
    return f"{kind.lower()} of {dtype.lower()} {shape}" if shape and dtype else "barrier"  # only a barrier takes none
