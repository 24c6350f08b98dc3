"""Restore the state of a process after an objective, for later evaluations."""

from __future__ import annotations

import gc
import locale
import operator
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

_UNREADABLE = object()
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Signals that programs usually catch. Reading the handlers of all signals would take 0.1 ms.
_SIGNALS = [
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGALRM),
    *(signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG),
    *(signal.SIGVTALRM, signal.SIGPROF),
]


def _set_device(device: torch.device) -> None:
    # A default device slows each call down.
    torch.set_default_device(device if device.type != "cpu" else None)


def _make_attribute_functions(
    owner: Any, path: str
) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return two functions that read and set an attribute; `path` may have dots."""
    parents, _, name = path.rpartition(".")
    if parents:
        owner = operator.attrgetter(parents)(owner)
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# The kernels of scaled dot product attention: functions that read and set whether each may be used.
_SDP_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
]
# An attribute without its own value has the value of its parent, such as "cudnn" of "cudnn.conv".
# Parents come first.
_BACKEND_ATTRIBUTES = (
    *("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision"),
    *("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.benchmark_limit", "cudnn.deterministic"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _make_list_functions(
    module: ModuleType, name: str
) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return two functions that read and restore a list in a module, such as sys.path."""

    def get_list() -> tuple[list[Any], list[Any]]:
        values = getattr(module, name)
        return values, list(values)

    def set_list(before: tuple[list[Any], list[Any]]) -> None:
        values, content = before
        values[:] = content
        setattr(module, name, values)

    return get_list, set_list


# The functions that read and set each part of the state.
_PROCESS_STATES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (lambda: dict(os.environ), _set_environment),
    *(_make_attribute_functions(sys, name) for name in ("stdin", "stdout", "stderr")),
    _make_list_functions(sys, "path"),
    _make_list_functions(warnings, "filters"),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (sys.getswitchinterval, sys.setswitchinterval),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    (lambda: time.tzname, lambda _: time.tzset()),  # of the environment, which is restored
    (np.geterr, lambda before: np.seterr(**before)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    # The older interface for the same precisions. If an objective uses both, it cannot be read, but
    # can be set.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(_make_attribute_functions(torch.backends, name) for name in _BACKEND_ATTRIBUTES),
    *_SDP_SWITCHES,
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
]


class ProcessState:
    """The state of this process at the start of an objective, which `restore` brings back.

    The state is everything in `_PROCESS_STATES`, the signal handlers, the umask and the working
    directory. Timers are stopped. Compiled code is dropped, since torch's compiler gives up on a
    function that it has compiled eight times.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        with suppress(OSError):  # The directory may have been removed.
            self._folder = Path.cwd()
        self._mask = os.umask(0o077)
        os.umask(self._mask)
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._values = [_read_value(get_value) for get_value, _ in _PROCESS_STATES]

    def restore(self) -> bool:
        """Restore the state, and return whether all parts of it could be restored."""
        # Timers come first, since their signals end a process without a handler.
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in self._handlers.items():
            # None is a handler outside of Python.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        is_restored = True
        for (get_value, set_value), value in zip(_PROCESS_STATES, self._values, strict=True):
            if value is not _UNREADABLE and _read_value(get_value) != value:
                with suppress(Exception):
                    set_value(value)
                is_restored &= bool(_read_value(get_value) in (value, _UNREADABLE))
        os.umask(self._mask)
        if self._folder is not None:
            with suppress(OSError):  # The directory may have been removed.
                os.chdir(self._folder)
        compiler: Any = sys.modules.get("torch._dynamo")
        # If CUDA is in use, the reset imports torch._inductor, which takes seconds.
        if compiler is not None and getattr(compiler.convert_frame, "FRAME_COUNTER", True):
            compiler.reset()
        return is_restored


def _read_value(get_value: Callable[[], Any]) -> Any:
    try:
        return get_value()
    # It is not restored, since an import of the search file has made it unreadable.
    except Exception:
        return _UNREADABLE
