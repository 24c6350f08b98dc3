"""The last moments of a process that native code ends: long enough to say which evaluation it was in, and where.

gloo and nccl end their process from threads of their own, where no exception reaches Python. The signal that ends the
process is handled first by faulthandler, which writes the stacks of all threads into a pipe, and then by libc's sleep,
which takes the number of the signal for seconds. The process dies after that, but its other threads, the watch's among
them, have time to report.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import re
import select
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import FrameSummary
from types import TracebackType

from hpo.process.place import in_objective

_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
_NAMES = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}
_PIPE_BYTES = 1 << 20  # for the stacks of a hundred threads, as far as the system allows
_COLLECTIVES = "/torch/distributed/"
_MISMATCH = (
    "the ranks of its worker were in collectives of different sizes, or in different numbers of them "
    "(TORCH_DISTRIBUTED_DEBUG=DETAIL compares them all)"
)
_LAST_LINE = "\nExtension modules: "
_LONGEST_PAUSE = 1.0  # seconds, in which the thread that writes may wait for a core
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# What is not ASCII, as faulthandler writes it.
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


@dataclass(frozen=True)
class Death:
    """The name of the signal that a process dies of, and the frames of the objective in its main thread, if any."""

    signal: str
    frames: Sequence[FrameSummary]

    def __str__(self) -> str:
        what = f"the process died of {self.signal}"
        in_a_collective = any(_COLLECTIVES in frame.filename for frame in self.frames)
        return f"{what}, most likely because {_MISMATCH}" if self.signal == "SIGABRT" and in_a_collective else what


class Crash:
    """Catches the signals that end this process, while inside ``with``, which the main thread enters.

    Where the thread that dies holds Python's lock, no other thread can report it. Where faulthandler was enabled
    already, nothing is caught, and faulthandler goes on to write where it was told to.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)  # what does not fit is left out: perhaps no thread can read it now
        with suppress(OSError, AttributeError):
            fcntl.fcntl(self._told, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._is_caught = not faulthandler.is_enabled()

    def __enter__(self) -> Crash:
        if self._is_caught:
            with suppress(AttributeError, OSError):  # a system without glibc: signals end the process at once
                libc = ctypes.CDLL(None)
                # Such a handler is called once: with a lasting one, a fault would be repeated and caught for ever.
                libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
                for number in _SIGNALS:
                    libc.sysv_signal(number, ctypes.cast(libc.sleep, ctypes.c_void_p))
                faulthandler.enable(self._told)
                os.register_at_fork(after_in_child=_let_go)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_caught:
            _let_go()
        os.close(self._heard)
        os.close(self._told)

    def read(self) -> Death | None:
        """Return what this process is dying of; None while it lives."""
        if not select.select([self._heard], [], [], 0)[0]:
            return None
        dump = ""
        while _LAST_LINE not in dump and select.select([self._heard], [], [], _LONGEST_PAUSE)[0]:
            dump += os.read(self._heard, 65536).decode("utf-8", "replace")
        kind = dump.partition("\n")[0].rpartition(": ")[2]
        _, _, stack = dump.partition(f"0x{self._main:016x}")
        stack = _ESCAPED.sub(lambda code: chr(int(code[code.lastindex or 0], 16)), stack.partition("\n\n")[0])
        found = _FRAME.findall(stack)
        frames = [FrameSummary(name, int(line), code) for name, line, code in reversed(found)]
        return Death(_NAMES.get(kind, kind), in_objective(frames))


def _let_go() -> None:
    """Let signals end this process, or one that was forked, as they always do."""
    faulthandler.disable()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
