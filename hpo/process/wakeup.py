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
    """Receives some signals in the place of their handlers, while inside ``with``, which the main thread enters.

    In a forked process, these signals have their handlers of before. The signals are blocked until these are back: a
    forked process shares the pipe, so that its parent would read its signals.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._mask = threading.local()  # the signal mask of before this thread began to fork
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
        """Wait to be woken, for so many seconds at most, and return the numbers of the signals that came."""
        select.select([self._read_end], [], [], seconds)
        with suppress(BlockingIOError):
            return [number for number in self._read_end.recv(4096) if number in self._signals]
        return []

    def fileno(self) -> int:
        """Return the descriptor to wait for together with other files; it can be read once this has been woken."""
        return self._read_end.fileno()

    def wake(self) -> None:
        """End a wait; may be called from any thread."""
        with suppress(OSError):
            self._write_end.send(_WAKE)

    def _listen(self) -> int:
        """Let Python write the number of each signal to the pipe; return the descriptor that it wrote to before."""
        return signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Native code may keep the main thread from running this for a long time. The signal's number is in the pipe
        # already, unless an objective has set a wakeup descriptor of its own, as asyncio does.
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
