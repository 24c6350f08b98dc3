"""The accelerator of this process: its devices, and the memory that evaluations leave there.

torch names the accelerator of its build "cuda" (NVIDIA, and AMD with ROCm) or "xpu" (Intel). Only
trainers call these functions, because a process that has asked the driver is not safe to fork.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpo.process.linux import has_gpu_files
from hpo.text_format import format_error

_VISIBILITY_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_SECONDS_TO_FREE = 30.0  # The driver frees the memory of a killed process within seconds.
_POLL_SECONDS = 0.1
# Part of a device's memory that may be missing at the start of an evaluation: libraries keep
# buffers on the device.
_TOLERATED_SHARE = 0.05
# That an evaluation may leave behind. Libraries keep up to 32 MiB per thread and stream.
_TOLERATED_BYTES = 128 << 20
_MEBIBYTE = 1 << 20


def find_devices() -> dict[str, Any]:
    """Return the devices that this process sees.

    Returns:
        The ``ids`` (UUIDs) and ``names`` of the devices, the ``backend`` of process groups of these
        devices, and the environment ``variables`` that select the visible devices, the first with
        precedence. ``problem`` is why torch finds no device although this host has some, otherwise
        an empty text.
    """
    kind = torch.accelerator.current_accelerator()
    with warnings.catch_warnings():  # All ranks would print the reason that is returned.
        warnings.simplefilter("ignore")
        if kind is None or not torch.accelerator.is_available():
            return {"ids": [], "problem": _explain_absence(kind).rstrip(".")}
    variables = []
    if kind.type == "xpu":
        variables = ["ZE_AFFINITY_MASK"]
    elif kind.type == "cuda":
        variables = ["CUDA_VISIBLE_DEVICES"]
        if torch.version.hip:
            # With ROCm, both have the same meaning. Their indices count in the list of
            # ROCR_VISIBLE_DEVICES.
            variables.insert(0, "HIP_VISIBLE_DEVICES")
    module = torch.get_device_module(kind)
    ids = []
    names = []
    for index in range(torch.accelerator.device_count()):
        device = module.get_device_properties(index)
        ids.append(str(getattr(device, "uuid", f"{kind.type}:{index}")))
        names.append(device.name)
    return {
        "ids": ids,
        "names": names,
        "backend": dist.get_default_backend_for_device(kind),
        "variables": variables,
        "problem": "",
    }


def _explain_absence(kind: torch.device | None) -> str:
    if any(os.environ.get(name) in ("", "-1", "NoDevFiles") for name in _VISIBILITY_VARIABLES):
        return ""  # The user has hidden all devices.
    if kind is None:
        return "this torch was built for CPUs" if has_gpu_files() else ""
    module = torch.get_device_module(kind)
    # NVML counts GPUs even if CUDA cannot use them.
    if not (has_gpu_files() or module.device_count()):
        return ""
    try:
        module.init()
    except Exception as error:
        return format_error(error).partition("\n")[0]
    return "torch finds none of them"


def find_accelerator_in_use() -> Any:
    """Return torch's module for the accelerator, such as `torch.cuda`, if this process uses it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    return module if module.is_initialized() else None


def select_device(indices: Sequence[int]) -> tuple[torch.device, ...]:
    """Return these devices, of which the first becomes the current one; the CPU without any."""
    kind = torch.accelerator.current_accelerator()
    if not indices or kind is None:
        return (torch.device("cpu"),)
    torch.accelerator.set_device_index(indices[0])
    return tuple(torch.device(kind.type, index) for index in indices)


class DeviceMemory:
    """The memory of a trainer's first device, before and after evaluations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._allocated_before = 0

    def await_free(self, expected: int) -> tuple[int, str]:
        """Wait until the device has `expected` free bytes, as at the worker's first evaluation.

        Returns the free bytes, and a warning if they did not become free in time.
        """
        if self._is_on_cpu:
            return 0, ""
        give_up_at = time.monotonic() + _SECONDS_TO_FREE
        while True:
            free, total = torch.accelerator.get_memory_info(self._device)
            if free >= expected - _TOLERATED_SHARE * total:
                return free, ""
            if time.monotonic() > give_up_at:
                break
            time.sleep(_POLL_SECONDS)
        warning = (
            f"{(expected - free) / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB of the memory of "
            f"{self._device} are still in use after {_SECONDS_TO_FREE:g} s{_find_users()}"
        )
        return free, warning

    def begin_evaluation(self) -> None:
        """Remember how much memory is allocated."""
        if not self._is_on_cpu:
            self._allocated_before = torch.accelerator.memory_allocated(self._device)

    def find_remains(self) -> str | None:
        """Free the memory of an ended evaluation. Return what remains; None if nothing does.

        Cycles of Python objects may hold gigabytes of the device, which do not cause a garbage
        collection.
        """
        if self._is_on_cpu:
            return None
        gc.collect()
        try:
            torch.accelerator.synchronize(self._device)
        except RuntimeError as error:  # An earlier error has made the context unusable.
            return f"the device reports {format_error(error).partition(chr(10))[0]}"
        if self._device.type == "cuda":  # cuBLAS keeps a workspace for each thread and stream.
            torch._C._cuda_clearCublasWorkspaces()
        torch.accelerator.empty_cache()
        left = torch.accelerator.memory_allocated(self._device) - self._allocated_before
        if left <= _TOLERATED_BYTES:
            return None
        return (
            f"{left / _MEBIBYTE:.0f} MiB of the memory of the device remain allocated: "
            f"{self._describe_largest()}"
        )

    def _describe_largest(self) -> str:
        tensors = [value for value in gc.get_objects() if isinstance(value, torch.Tensor)]
        tensors = [tensor for tensor in tensors if tensor.device == self._device]
        tensors.sort(key=lambda tensor: tensor.nbytes, reverse=True)
        largest = [
            f"{tuple(tensor.shape)} {tensor.dtype}, {tensor.nbytes / _MEBIBYTE:.0f} MiB"
            for tensor in tensors[:3]
        ]
        return "; ".join(largest) or "no tensor of Python holds it"


def _find_users() -> str:
    """Return the processes that use GPUs of this host, as the end of a sentence, if known."""
    query = "--query-compute-apps=pid,process_name,used_memory"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        found = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    users = [line for line in found.splitlines() if line and not line.startswith(f"{os.getpid()},")]
    return f". Processes on GPUs: {'; '.join(users)}" if users else ""
