"""Run a training program in a trainer, send its end to the supervisor, and end the process.

A program is a Python script or module, which runs as `__main__`, or a command, which is a child
process.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.util
import io
import linecache
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from hpo.process.channel import Channel, ChannelClosed
from hpo.process.failure import describe_status
from hpo.process.linux import has_children
from hpo.process.messages import ObjectiveEnd
from hpo.process.trace import Trace
from hpo.process.user_frames import UserFrames, extract_error_frames
from hpo.trainer.objective_runner import describe_failure, is_connection_error
from hpo.trainer.probe import Probe
from hpo.trainer.signals import Cancelled, InterruptHandler, end_if_forked

# Time to be cancelled before a connection error counts as the cause of a failure.
_CANCEL_WAIT_SECONDS = 3.0
_MAX_OPENED_FILES = 1_000  # It opens a checkpoint at its beginning.
_CODE_SUFFIXES = (".py", ".pyc", ".so")
_TERMINATION_SECONDS = 2.0  # A cancelled command has this time before it is killed.
# The second is the status of a shell whose last process has aborted.
_ABORT_STATUSES = (-signal.SIGABRT, 128 + signal.SIGABRT)


class EarlierFiles:
    """Notices files that a program reads, and that were written before it started.

    Only files count that were written after `since`, in seconds since the epoch, at which the run
    began: an earlier evaluation has probably written them. The evaluation's own folder does not
    count, nor do hidden folders, which libraries use.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._until = time.time()
        self._left = _MAX_OPENED_FILES
        self._own_folder = ""
        self._times: dict[str, int] = {}  # Times of the last change, in nanoseconds, by path.

    def start(self) -> None:
        """Observe this process from now on. It cannot be stopped."""
        self._own_folder = f"{os.environ['HPO_FOLDER']}/"
        sys.addaudithook(self._observe)

    def find_files(self) -> dict[str, bool]:
        """Return, by path, whether the files have changed since the program has read them."""
        return {path: _read_change_time(path) != at for path, at in self._times.items()}

    def _observe(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._left:
            with suppress(Exception):  # It must not change what the program does.
                self._take_file(arguments[0], arguments[2])

    def _take_file(self, path: object, flags: int) -> None:
        if not isinstance(path, str) or flags & (os.O_WRONLY | os.O_TRUNC | os.O_APPEND):
            return
        location = os.path.normpath(Path(path).absolute())
        is_ignored = location.endswith(_CODE_SUFFIXES) or "/." in location
        if is_ignored or location.startswith(self._own_folder) or location in self._times:
            return
        self._left -= 1
        changed = _read_change_time(location)
        if self._since < changed / 1e9 < self._until:
            self._times[location] = changed


def _read_change_time(path: str) -> int:
    """Return when a file has changed last, in nanoseconds since the epoch; 0 without a file."""
    try:
        status = Path(path).stat()
    except OSError:
        return 0
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else 0


class ProgramRunner:
    """Runs a program to its end, and then ends this process.

    `source` is the content of a Python script when it was first read; None to read it now.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: InterruptHandler,
        command: Sequence[str],
        files: EarlierFiles,
        source: bytes | None = None,
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._command = command
        self._files = files
        self._source = source
        self._name = command[1] if command[0] == "-m" else Path(command[0]).name
        self._location = Path(command[0]).absolute()

    def run(self, environment: Mapping[str, str], probe: ProgramProbe | None) -> NoReturn:
        """Run the program, send the supervisor how it has ended, and end this process.

        `probe` observes the program for `hpo check`.
        """
        os.environ.update(environment)
        # Forked processes would draw the same numbers, for example for batches and names of files.
        random.seed()
        np.random.seed()
        torch.seed()
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        self._interrupts.begin_evaluation()
        self._channel.send("joined")
        self._files.start()
        end, status = self._run_to_end()
        end = replace(end, earlier_files=self._files.find_files())
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        with suppress(ChannelClosed):
            if probe is not None:
                trace = probe.stop_probe(is_cut=end.is_cancelled)
                self._channel.send("seen", **vars(trace))
            self._channel.send("end", **vars(end))
        os._exit(status)  # This skips destructors of native code, in which torch sometimes aborts.

    def _run_to_end(self) -> tuple[ObjectiveEnd, int]:
        """Run the program. Return how it has ended, and its exit status.

        Functions of atexit also run after a failure, but not if the program was cancelled.
        """
        end = ObjectiveEnd(ends_trainer=True)
        status = 0
        try:
            with self._interrupts.allow_cancellation():
                if self._command[0] == "-m":
                    _run_module(self._command[1], self._command[2:])
                elif self._location.suffix == ".py":
                    _run_script(Path(self._command[0]), self._command[1:], self._source)
                else:
                    _run_command(self._command)
        except BaseException as error:
            end_if_forked(error)
            if status := _compute_exit_status(error):
                end = self._make_failed_end(self._find_cause(error))
        end_if_forked()
        if end.is_cancelled:
            return end, status
        try:
            # Cancelled is not raised here, since functions of atexit would print it. A cancelled
            # program has some seconds to end: it needs more than one on busy cores, and `hpo check`
            # needs its trace.
            with self._interrupts.only_acknowledge():
                _end_process()
        except BaseException as error:
            end_if_forked(error)
            if not status:
                end = self._make_failed_end(error)
                status = 1
        return end, status

    def _find_cause(self, error: BaseException) -> BaseException:
        """Return Cancelled if a cancellation follows a connection error; otherwise the error.

        A connection breaks if another rank fails. The supervisor then cancels this program within
        some seconds.
        """
        if is_connection_error(str(error)):
            try:
                with self._interrupts.allow_cancellation():
                    time.sleep(_CANCEL_WAIT_SECONDS)
            except Cancelled as cancelled:
                return cancelled
        return error

    def _make_failed_end(self, error: BaseException) -> ObjectiveEnd:
        """Describe the failure of the program. Print an exception as Python does."""
        frames = extract_error_frames(error)
        is_cancelled = self._interrupts.is_cancel_requested
        end = describe_failure(error, frames, is_cancelled, has_worker=False)
        if isinstance(error, ExitStatusError):
            return replace(
                end, failure=str(error), is_status=True, is_abort=error.is_abort, ends_trainer=True
            )
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            reason = f"{self._name} ended with status {_compute_exit_status(error)}"
            return replace(end, failure=reason, is_status=True, ends_trainer=True)
        if not isinstance(error, Cancelled):
            begin = error.__traceback__
            while begin is not None and begin.tb_frame.f_globals.get("__name__") != "__main__":
                begin = begin.tb_next  # The printed part begins in the script.
            traceback.print_exception(type(error), error, begin or error.__traceback__)
        return replace(
            end, place=UserFrames(self._location).find_position(frames), ends_trainer=True
        )


def _compute_exit_status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


class ExitStatusError(Exception):
    """Raised if a command fails. `is_abort` is whether SIGABRT has ended it."""

    def __init__(self, text: str, is_abort: bool) -> None:
        super().__init__(text)
        self.is_abort = is_abort


def _end_process() -> None:
    """Wait for threads, call the functions of atexit, and flush files, as Python does at exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in gc.get_objects():
        with suppress(Exception):
            if isinstance(file, (io.TextIOWrapper, io.BufferedWriter)):
                file.flush()


def _run_script(path: Path, arguments: Sequence[str], source: bytes | None) -> None:
    location = str(path.absolute())
    source = path.read_bytes() if source is None else source
    lines = io.StringIO(importlib.util.decode_source(source)).readlines()
    linecache.cache[location] = (len(source), None, lines, location)
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(Path(location).resolve().parent))
    _run_main(compile(source, location, "exec", dont_inherit=True), __file__=location)


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.path.insert(0, str(Path.cwd()))
    sys.argv[:] = ["-m", *arguments]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ModuleNotFoundError(f"there is no module {name!r} that can be run")
    sys.argv[0] = spec.origin or name
    _run_main(code, __file__=spec.origin, __spec__=spec, __package__=spec.parent)


def _run_main(code: CodeType, **names: object) -> None:
    """Run code as `__main__`.

    The module stays in `sys.modules` afterwards, since threads, finalizers and spawned processes
    may use it.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __cached__=None, **names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - It is the user's program.


def _run_command(command: Sequence[str]) -> None:
    # Unbuffered lines are read while it runs, so that pruners get its losses in time.
    process = subprocess.Popen(command, env={"PYTHONUNBUFFERED": "1", **os.environ})
    try:
        status = process.wait()
    except Cancelled:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERMINATION_SECONDS)
        process.kill()
        raise
    if status:
        raise ExitStatusError(f"{command[0]} {describe_status(status)}", status in _ABORT_STATUSES)


class ProgramProbe(Probe):
    """Observes a program in this process, from construction to `stop_probe`."""

    def __init__(self) -> None:
        super().__init__()
        variables = set[str]()
        self._variables = variables
        look_up = os._Environ.__getitem__

        def look_up_and_record(environment: Any, name: Any) -> Any:
            variables.add(str(name))
            return look_up(environment, name)

        # The change need not be undone, since this process ends with the program.
        os._Environ.__getitem__ = look_up_and_record  # type: ignore[method-assign]
        self.__enter__()

    def stop_probe(self, is_cut: bool) -> Trace:
        """Return the trace of the program. `is_cut` is whether the program was cancelled."""
        self.__exit__()
        self.trace.variables = sorted(self._variables)
        self.trace.has_children = has_children()
        self.trace.was_cut = is_cut
        return self.trace
