"""A terminal that is taken over for a while, its whole screen and its keys, and then given back as it was."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.screen import Screen
from rich.text import Text

from hpo.process.wakeup import WakeupPipe

_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Left(Exception):  # noqa: N818 - no error
    """A key or a signal asks to leave the view; `status` is the exit status for it."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


class Terminal:
    """The screen and the keys while inside ``with``, which the main thread enters.

    Keys are read at once and not shown, if standard input is a terminal. While the process is suspended, the terminal
    is as it was.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._wakeup = WakeupPipe((signal.SIGINT, signal.SIGTSTP, signal.SIGWINCH, *_ENDS))

    def __enter__(self) -> Terminal:
        self._wakeup.__enter__()
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        self._wakeup.__exit__()

    def show(self, lines: Sequence[Text]) -> None:
        """Show lines on the whole screen."""
        self._console.update_screen(Screen(Group(*lines)))

    def wait(self, seconds: float) -> None:
        """Wait so many seconds at most, less where the screen must be drawn; raises Left for q or a signal to end."""
        keys = [] if self._keys is None else [self._keys]
        ready, _, _ = select.select([self._wakeup, *keys], [], [], max(0.0, seconds))
        for number in self._wakeup.wait(0) if self._wakeup in ready else []:
            if number == signal.SIGINT:
                raise Left(0)
            if number in _ENDS:
                raise Left(128 + number)
            if number == signal.SIGTSTP:
                self._suspend()
        for key in [key for key in keys if key in ready]:
            self._hear(key)

    def _hear(self, keys: int) -> None:
        try:
            typed = os.read(keys, 1024)
        except OSError:  # the terminal is gone
            raise Left(0) from None
        if b"q" in typed.lower():
            raise Left(0)
        if not typed:
            self._keys = None

    def _take(self) -> None:
        """Take the terminal; its settings are changed first, where the system stops a process in the background."""
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            changed = termios.tcgetattr(self._keys)
            changed[3] &= ~(termios.ICANON | termios.ECHO)
            changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._keys, termios.TCSADRAIN, changed)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _give_back(self) -> None:
        with suppress(OSError):  # also where the terminal is gone
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
        if self._keys is not None and self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    def _suspend(self) -> None:
        """Give the terminal back, stop as the signal would stop this process, and take the terminal when it goes on."""
        self._give_back()
        heard = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # goes on here
        signal.signal(signal.SIGTSTP, heard)
        self._take()
