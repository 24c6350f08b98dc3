"""What wakes a thread: signals to the process, whatever its main thread is doing, and rings of other threads."""

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

_RING = b"\0"


class Bell:
    """Rings for some signals instead of what Python does on them, while inside ``with``, which the main thread enters.

    Processes that are forked meanwhile treat signals as before, from their first moment on: a signal that came earlier
    would ring in the process that has forked them, and be lost to them.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._mask = threading.local()  # as it was before this thread began to fork
        self._hammer, self._sound = socket.socketpair()
        self._hammer.setblocking(False)
        self._sound.setblocking(False)

    def __enter__(self) -> Bell:
        self._before = {number: signal.signal(number, self._on_signal) for number in self._signals}
        self._listen()
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._become_another)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def wait(self, seconds: float) -> list[int]:
        """Wait for a ring, for so long at most, and give the signals that came."""
        select.select([self._sound], [], [], seconds)
        with suppress(BlockingIOError):
            return [number for number in self._sound.recv(4096) if number in self._signals]
        return []

    def fileno(self) -> int:
        """Give what can be waited for together with other files; it can be read when there was a ring."""
        return self._sound.fileno()

    def ring(self) -> None:
        """End a wait; from any thread."""
        with suppress(OSError):
            self._hammer.send(_RING)

    def _listen(self) -> int:
        """Have the number of each signal written to the bell at once; gives where they were written before."""
        return signal.set_wakeup_fd(self._hammer.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Native code keeps the main thread from running this for as long as it likes, so that the number is there
        # already, unless an objective has taken the wakeup for itself, as asyncio does.
        if self._listen() != self._hammer.fileno():
            with suppress(OSError):
                self._hammer.send(bytes([number]))

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
