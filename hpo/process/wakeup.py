"""A pipe by which signals and other threads wake a thread, even while the main thread is busy."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_WAKE = b"\0"


class WakeupPipe:
    """Receives signals inside `with`, and wakes the thread that calls `wait`. The main thread must enter the `with`.

    Inside `with`, the usual handlers of the signals are not called.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._previous_handlers: dict[int, Any] = {}
        self._write_end, self._read_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._read_end.setblocking(False)

    def __enter__(self) -> WakeupPipe:
        self._previous_handlers = {number: signal.signal(number, lambda *_: None) for number in self._signals}
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most `seconds` for a signal or for `wake`; return the numbers of the signals that have arrived."""
        select.select([self._read_end], [], [], seconds)
        with suppress(BlockingIOError):
            return [number for number in self._read_end.recv(4096) if number in self._signals]
        return []

    def fileno(self) -> int:
        """Return a file descriptor to wait on together with other files. It is readable after a signal or `wake`."""
        return self._read_end.fileno()

    def wake(self) -> None:
        """End the wait of the thread that calls `wait`. Any thread may call this."""
        with suppress(OSError):
            self._write_end.send(_WAKE)
