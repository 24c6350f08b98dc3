"""A training program in a trainer: it runs to its end, which is the end of this process, and is reported."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpo.process.channel import Channel, ChannelClosed
from hpo.process.failure import stack_of, traceback_of, with_hint
from hpo.process.place import Places, frames_of
from hpo.trainer.evaluation import ECHOES, TIMEOUTS
from hpo.trainer.execution import StatusError, begin_process, end_process, execute
from hpo.trainer.forks import end_if_forked
from hpo.trainer.interrupts import Cancelled, Interrupts
from hpo.trainer.watching import Watched

_SECONDS_TO_BE_CANCELLED = 3.0  # after a peer was, before an error of its connection is shown


class Running:
    """A program that this process runs to its end, and with which it ends.

    `source` is the content of a Python script as it was read first, None to read it.
    """

    def __init__(
        self, channel: Channel, interrupts: Interrupts, command: Sequence[str], source: bytes | None = None
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._command = command
        self._source = source
        self._name = command[1] if command[0] == "-m" else Path(command[0]).name
        self._location = Path(command[0]).absolute()
        self._watched: Watched | None = None

    def watch(self) -> None:
        """See what the program does, for `hpo check`."""
        self._watched = Watched()

    def run(self, environment: Mapping[str, str]) -> NoReturn:
        """Run the program, send its end to the supervisor, and end this process."""
        os.environ.update(environment)
        begin_process()
        self._interrupts.begin()
        self._channel.send("joined")
        step, status = self._run_to_end()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        with suppress(ChannelClosed):
            if self._watched is not None:
                seen = self._watched.end(is_cut=bool(step.get("is_cancelled")))
                self._channel.send("seen", **seen.as_data())
            self._channel.send("step", **step, is_clean=False)
        os._exit(status)  # without destructors of native code, in which torch aborts now and then

    def _run_to_end(self) -> tuple[dict[str, Any], int]:
        """Return the last step of the program, and its exit status; functions for the exit run after a failure, too."""
        step: dict[str, Any] = {"ended": True}
        status = 0
        try:
            with self._interrupts.inside():
                execute(self._command, self._source)
        except BaseException as error:
            end_if_forked(error)
            if status := _status_of(error):
                step = self._failed(self._cause_of(error))
        end_if_forked()
        if step.get("is_cancelled"):
            return step, status
        try:
            # Without Cancelled, which functions for the exit would print. If it is cancelled now, it has some seconds
            # to end: on busy cores it needs more than one, and `hpo check` would see nothing of it.
            with self._interrupts.ending():
                end_process()
        except BaseException as error:
            end_if_forked(error)
            if not status:
                step, status = self._failed(error), 1
        return step, status

    def _cause_of(self, error: BaseException) -> BaseException:
        """Return Cancelled instead of an error about the connection to a peer, if the evaluation was called off."""
        if any(text in str(error) for text in ECHOES):
            try:
                with self._interrupts.inside():
                    time.sleep(_SECONDS_TO_BE_CANCELLED)
            except Cancelled as cancelled:
                return cancelled
        return error

    def _failed(self, error: BaseException) -> dict[str, Any]:
        """Return the failure of the program as a step; print an exception as Python does."""
        is_status = isinstance(error, (StatusError, SystemExit))
        reason = f"{type(error).__name__}: {with_hint(error)}"
        if isinstance(error, StatusError):
            reason = str(error)
        elif isinstance(error, SystemExit):
            reason = f"{self._name} ended with status {_status_of(error)}"
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif not isinstance(error, Cancelled):
            traceback.print_exception(type(error), error, self._own_part(error.__traceback__))
        frames = frames_of(error)
        return {
            "failure": reason,
            "is_cancelled": isinstance(error, Cancelled) or self._interrupts.was_requested,
            "is_status": is_status,
            "is_abort": isinstance(error, StatusError) and error.is_abort,
            "echo": any(text in reason for text in ECHOES),
            "gave_up": isinstance(error, RuntimeError) and any(text in reason for text in TIMEOUTS),
            "seconds": 0.0,
            "at": time.time(),
            "place": "" if is_status else Places(self._location).of(frames),
            "traceback": stack_of(frames) if isinstance(error, Cancelled) else traceback_of(error, frames),
        }

    def _own_part(self, found: Any) -> Any:
        """Return the part of a traceback that begins in the script."""
        begin = found
        while begin is not None and begin.tb_frame.f_globals.get("__name__") != "__main__":
            begin = begin.tb_next
        return begin or found


def _status_of(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
