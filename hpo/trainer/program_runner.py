"""Run a training program in a trainer, send its result to the supervisor, and end the process.

The trainer is the process that runs the program for one rank. The supervisor is the MPI process of that rank.
"""

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
from hpo.process.failure import format_stack, format_traceback, format_with_hint
from hpo.process.user_frames import UserFrames, extract_error_frames
from hpo.trainer.forks import end_if_forked
from hpo.trainer.interrupts import Cancelled, InterruptHandler
from hpo.trainer.objective_runner import CONNECTION_ERRORS, TIMEOUT_ERRORS
from hpo.trainer.program_execution import ExitStatusError, end_process, execute_program, reset_process
from hpo.trainer.program_probe import ProgramProbe

_CANCEL_WAIT_SECONDS = 3.0  # Time to be cancelled before a connection error counts as the cause of a failure.


class ProgramRunner:
    """Runs a program to its end, and then ends this process.

    `source` is the content of a Python script when it was first read. If it is None, the script is read when it starts.
    """

    def __init__(
        self, channel: Channel, interrupts: InterruptHandler, command: Sequence[str], source: bytes | None = None
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._command = command
        self._source = source
        self._name = command[1] if command[0] == "-m" else Path(command[0]).name
        self._location = Path(command[0]).absolute()
        self._probe: ProgramProbe | None = None

    def start_probe(self) -> None:
        """Begin to observe the program for `hpo check`. Call it before `run`."""
        self._probe = ProgramProbe()

    def run(self, environment: Mapping[str, str]) -> NoReturn:
        """Run the program, send the supervisor how it has ended, and end this process."""
        os.environ.update(environment)
        reset_process()
        self._interrupts.begin_evaluation()
        self._channel.send("joined")
        end, status = self._run_to_end()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        with suppress(ChannelClosed):
            if self._probe is not None:
                trace = self._probe.stop_probe(is_cut=bool(end.get("is_cancelled")))
                self._channel.send("seen", **trace.to_data())
            self._channel.send("end", **end, is_clean=False)
        os._exit(status)  # This skips destructors of native code, in which torch sometimes aborts.

    def _run_to_end(self) -> tuple[dict[str, Any], int]:
        """Run the program. Return the content of a message about its failure, empty without one, and its exit status.

        Functions of atexit also run after a failure, but not if the program was cancelled.
        """
        end: dict[str, Any] = {}
        status = 0
        try:
            with self._interrupts.allow_cancellation():
                execute_program(self._command, self._source)
        except BaseException as error:
            end_if_forked(error)
            if status := _compute_exit_status(error):
                end = self._make_failed_end(self._find_cause(error))
        end_if_forked()
        if end.get("is_cancelled"):
            return end, status
        try:
            # Cancelled is not raised here, since functions of atexit would print it. A cancelled program has some
            # seconds to end: it needs more than one on busy cores, and `hpo check` needs its trace.
            with self._interrupts.only_acknowledge():
                end_process()
        except BaseException as error:
            end_if_forked(error)
            if not status:
                end, status = self._make_failed_end(error), 1
        return end, status

    def _find_cause(self, error: BaseException) -> BaseException:
        """Return Cancelled if `error` is a connection error, and a cancellation follows it; otherwise return `error`.

        A connection breaks if another rank fails. The supervisor then cancels this program within some seconds.
        """
        if any(text in str(error) for text in CONNECTION_ERRORS):
            try:
                with self._interrupts.allow_cancellation():
                    time.sleep(_CANCEL_WAIT_SECONDS)
            except Cancelled as cancelled:
                return cancelled
        return error

    def _make_failed_end(self, error: BaseException) -> dict[str, Any]:
        """Return the content of a message about the failure of the program. Print an exception as Python does."""
        is_status = isinstance(error, (ExitStatusError, SystemExit))
        reason = f"{type(error).__name__}: {format_with_hint(error)}"
        if isinstance(error, ExitStatusError):
            reason = str(error)
        elif isinstance(error, SystemExit):
            reason = f"{self._name} ended with status {_compute_exit_status(error)}"
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif not isinstance(error, Cancelled):
            traceback.print_exception(type(error), error, self._trim_traceback(error.__traceback__))
        frames = extract_error_frames(error)
        return {
            "failure": reason,
            "is_cancelled": isinstance(error, Cancelled) or self._interrupts.is_cancel_requested,
            "is_status": is_status,
            "is_abort": isinstance(error, ExitStatusError) and error.is_abort,
            "echo": any(text in reason for text in CONNECTION_ERRORS),
            "gave_up": isinstance(error, RuntimeError) and any(text in reason for text in TIMEOUT_ERRORS),
            "seconds": 0.0,
            "at": time.time(),
            "place": "" if is_status else UserFrames(self._location).find_position(frames),
            "traceback": format_stack(frames) if isinstance(error, Cancelled) else format_traceback(error, frames),
        }

    def _trim_traceback(self, traceback_object: Any) -> Any:
        """Return the part of a traceback that begins in the script."""
        begin = traceback_object
        while begin is not None and begin.tb_frame.f_globals.get("__name__") != "__main__":
            begin = begin.tb_next
        return begin or traceback_object


def _compute_exit_status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
