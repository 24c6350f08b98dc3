"""A search whose trainers crash or hang, on one rank, in chosen evaluations.

`ways` are taken in turn; the second worker begins with the middle one. Before a crash, all ranks
meet in a collective. In the next collective, the other ranks wait for the crashing rank. Each rank
notes its start and its crash.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hpo import Float, SearchSpace
from tests.searches.counting import count, note

space = SearchSpace(x=Float(0.0, 1.0))
KEPT: list[object] = []


@dataclass(frozen=True)
class Settings:
    ways: str = ""  # divided by commas
    every: int = 5  # which evaluations of a worker crash: 5 every fifth, beginning with the first
    after: str = "0"  # losses before a crash: numbers, divided by commas, taken in turn
    rank: int = -1  # of the worker; -1 each in turn
    steps: int = 2
    seconds: float = 0.0  # that each step takes
    folder: str = "."
    gate: str = ""  # A file that evaluations wait for before their last step.


def leave():
    raise SystemExit("injected: exit")


def fail():
    raise ValueError("injected")


def overflow_stack():
    """Overflow the stack in glibc's parser of regular expressions.

    Python's recursion limit does not apply to C code.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, hard))
    depth, extended = 1_000_000, 1
    ctypes.CDLL(None).regcomp(
        ctypes.create_string_buffer(256), b"(" * depth + b")" * depth, extended
    )


def use_up_memory():
    """Limit the address space, and allocate all of it but the last megabyte."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    while True:
        KEPT.append(bytearray(1 << 20))


def use_up_descriptors():
    """Open files until no descriptor is free, and keep them open.

    Then continue until a descriptor is needed.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with suppress(OSError):
        while True:
            KEPT.append(open("/dev/null"))  # noqa: PTH123, SIM115
    dist.all_reduce(torch.ones(4))
    Path("/dev/null").read_text()


def leave_process():
    """Exit, but leave a process and its child in their own session.

    Both keep the standard streams open.
    """
    subprocess.Popen(["sh", "-c", "sleep 3601; true"], close_fds=False, start_new_session=True)
    time.sleep(0.1)
    os._exit(1)


def leave_fork():
    """Exit, but leave a forked process in its own session. It keeps all descriptors open."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(3600)
        os._exit(0)
    os._exit(1)


def block_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))


def hang(library):
    """Wait for a mutex that this thread already holds. No signal handler can end the wait."""
    mutex = ctypes.create_string_buffer(128)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def hang_without_lock():
    block_signals()
    hang(ctypes.CDLL(None))


def sleep_without_signals():
    block_signals()
    time.sleep(3600)


def sleep_with_reset_signals():
    """Reset the handlers of all signals to those that Python knows, as Lightning after `fit`."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
    time.sleep(3600)


def swallow():
    while True:
        with suppress(BaseException):
            time.sleep(3600)


def end_never():
    try:
        raise ValueError("injected")
    finally:
        while True:
            time.sleep(0.1)


def end_never_if_cancelled():
    try:
        time.sleep(3600)
    finally:
        while True:
            time.sleep(0.1)


CRASHES = {
    "raise": fail,
    "exit": leave,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "outside": lambda: time.sleep(3600),  # until another process kills it
    "os._exit": lambda: os._exit(0),
    "C exit": lambda: ctypes.CDLL(None).exit(0),
    "C _exit": lambda: ctypes.CDLL(None)._exit(0),
    "overflow": overflow_stack,
    "close": lambda: os.closerange(3, 1000),
    "memory": use_up_memory,
    "descriptors": use_up_descriptors,
    "process": leave_process,
    "fork": leave_fork,
}
HANGS = {
    "lock": lambda: hang(ctypes.PyDLL(None)),
    "native": hang_without_lock,
    "signals": sleep_without_signals,
    "reset": sleep_with_reset_signals,
    "swallow": swallow,
    "finally": end_never,
    "cancelled": end_never_if_cancelled,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def objective(params, worker, settings):
    turn, left = divmod(count(params, worker, settings.folder), settings.every)
    ways, afters = settings.ways.split(","), settings.after.split(",")
    way = ways[(turn + worker.index * len(ways) // 2) % len(ways)] if left == 0 else ""
    rank = turn % worker.size if settings.rank < 0 else settings.rank
    about = {"way": way, "rank": rank, "x": params["x"], "process": os.getpid()}
    note(settings.folder, worker, event="starts", **about)
    value = torch.ones(4)
    dist.all_reduce(value)
    for step in range(settings.steps):
        if (
            way
            and step == int(afters[turn % len(afters)])
            and (worker.rank == rank or way == "differ")
        ):
            print(f"last words of {way}", file=sys.stderr, flush=True)
            note(settings.folder, worker, event="crashes", **about)
            if way == "differ":
                dist.all_reduce(torch.ones(3 + 1000 * worker.rank))
            else:
                (CRASHES | HANGS)[way]()
        time.sleep(settings.seconds)
        while step == settings.steps - 1 and settings.gate and not Path(settings.gate).exists():
            time.sleep(0.05)
        dist.all_reduce(value)
        yield params["x"] + 1 / (step + 1)
