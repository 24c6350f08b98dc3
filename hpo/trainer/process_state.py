"""Restore the state of a process after an objective, so that changes of this state do not affect later evaluations."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.backends import cudnn

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Signals that programs usually catch. Reading the handlers of all signals would take 0.1 ms.
_SIGNALS = [
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGVTALRM, signal.SIGPROF),
]


def _set_device(device: torch.device) -> None:
    torch.set_default_device(device if device.type != "cpu" else None)  # A default device slows each call down.


def _get_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(before: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _get_cudnn() -> tuple[bool, bool, bool]:
    return cudnn.enabled, cudnn.benchmark, cudnn.deterministic


def _set_cudnn(before: tuple[bool, bool, bool]) -> None:
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before


def _get_environment() -> dict[str, str]:
    return dict(os.environ)


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _get_streams() -> tuple[Any, Any, Any]:
    return sys.stdin, sys.stdout, sys.stderr


def _set_streams(before: tuple[Any, Any, Any]) -> None:
    sys.stdin, sys.stdout, sys.stderr = before


def _make_list_functions(module: ModuleType, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return two functions for a list in a module, such as sys.path: one reads the list, and the other restores it."""

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
    (_get_environment, _set_environment),
    (_get_streams, _set_streams),
    _make_list_functions(sys, "path"),
    _make_list_functions(warnings, "filters"),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (sys.getswitchinterval, sys.setswitchinterval),
    (np.geterr, lambda before: np.seterr(**before)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_get_deterministic, _set_deterministic),
    (_get_cudnn, _set_cudnn),
]


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Return a context at the end of which the state of this process is restored.

    The state is everything in `_PROCESS_STATES`, the signal handlers, the umask and the working directory. Timers are
    stopped. Compiled code is dropped, since torch's compiler gives up on a function that it has compiled eight times.
    """
    folder, mask = _get_working_directory(), _get_umask()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    states = [get_state() for get_state, _ in _PROCESS_STATES]
    try:
        yield
    finally:
        for timer in _TIMERS:  # Timers come first, since their signals end a process without a handler.
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:  # None is a handler outside of Python.
                signal.signal(number, handler)
        for (get_state, set_state), state in zip(_PROCESS_STATES, states, strict=True):
            if get_state() != state:
                set_state(state)
        os.umask(mask)
        if folder is not None:
            with suppress(OSError):  # The directory may have been removed.
                os.chdir(folder)
        if (compiler := sys.modules.get("torch._dynamo")) is not None:
            compiler.reset()  # This takes 0.1 ms.


def _get_working_directory() -> Path | None:
    with suppress(OSError):
        return Path.cwd()
    return None


def _get_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
