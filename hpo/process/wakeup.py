"""A wakeup pipe: a thread is woken by signals, whatever the main thread is doing, and by other threads."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_WAKE = b"\0"


class WakeupPipe:
    """Receives some signals in the place of what Python does on them, inside ``with``, which the main thread enters.

    Processes that are forked meanwhile treat signals as before, from their first moment on: a signal that came earlier
    would be read by the process that has forked them, and be lost to them.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._mask = threading.local()  # as it was before this thread began to fork
        self._write_end, self._read_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._read_end.setblocking(False)

    def __enter__(self) -> WakeupPipe:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        self._listen()
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._become_another)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def wait(self, seconds: float) -> list[int]:
        """Wait to be woken, for so long at most, and return the signals that came."""
        select.select([self._read_end], [], [], seconds)
        with suppress(BlockingIOError):
            return [number for number in self._read_end.recv(4096) if number in self._signals]
        return []

    def fileno(self) -> int:
        """Return what can be waited for together with other files; it can be read when somebody has woken this."""
        return self._read_end.fileno()

    def wake(self) -> None:
        """End a wait; from any thread."""
        with suppress(OSError):
            self._write_end.send(_WAKE)

    def _listen(self) -> int:
        """Have the number of each signal written to the pipe at once; returns where they were written before."""
        return signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Native code keeps the main thread from running this for as long as it likes, so that the number is there
        # already, unless an objective has taken the wakeup for itself, as asyncio does.
        if self._listen() != self._write_end.fileno():
            with suppress(OSError):
                self._write_end.send(bytes([number]))

    def _hold(self) -> None:
        self._mask.before = None  # another signal's handler may raise in any of these lines
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _release(self) -> None:
        if self._mask.before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _become_another(self) -> None:
        self._leave()
        self._release()

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}
