"""A training program in a trainer: a Python script as `__main__`, or another command as a child process."""

from __future__ import annotations

import ast
import atexit
import builtins
import importlib.util
import os
import random
import runpy
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from hpo.process.channel import Channel, ChannelClosed
from hpo.process.failure import stack_of, traceback_of, with_hint
from hpo.process.place import Places, frames_of
from hpo.script import Script, find_program
from hpo.trainer.evaluation import ECHOES, TIMEOUTS
from hpo.trainer.forks import end_if_forked
from hpo.trainer.interrupts import Cancelled, Interrupts
from hpo.trainer.watching import Watched

_SECONDS_TO_END = 2.0  # of a command that is cancelled
_SECONDS_TO_BE_CANCELLED = 3.0  # after a peer was, before an error of its connection is shown


class _Exit(Exception):  # noqa: N818 - an end with a status, which is a failure
    """A program has ended with a status other than 0."""


class Running:
    """A program that this process runs to its end, and with which it ends."""

    def __init__(self, channel: Channel, interrupts: Interrupts, command: Sequence[str]) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._command = command
        self._watched: Watched | None = None

    def watch(self) -> None:
        """See what the program does, for `hpo check`."""
        self._watched = Watched()

    def run(self, environment: Mapping[str, str]) -> NoReturn:
        """Run the program, send its end to the supervisor, and end this process."""
        os.environ.update(environment)
        # Processes that were forked from one template would draw the same numbers, as for names of files.
        random.seed()
        np.random.seed()
        self._interrupts.begin()
        self._channel.send("joined")
        step, status = self._run_to_end()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        with suppress(ChannelClosed):
            if self._watched is not None:
                self._channel.send("seen", **self._watched.end().as_data())
            self._channel.send("step", **step, is_clean=False)
        os._exit(status)  # without destructors of native code, in which torch aborts now and then

    def _run_to_end(self) -> tuple[dict[str, Any], int]:
        """Return the last step of the program, and its exit status."""
        try:
            with self._interrupts.inside():
                _runner(self._command)()
                end_if_forked()
                _finish()
        except BaseException as error:
            end_if_forked(error)
            if status := _status_of(error):
                cause = _cause_of(error, self._interrupts)
                return _failed(cause, Path(self._command[0]), self._interrupts), status
        return {"ended": True}, 0


def import_packages(script: Script) -> None:
    """Import the installed packages that a Python script imports at its top; what cannot be imported is left to it."""
    path = None if script.command[0] == "-m" else find_program(script)
    if path is None or path.suffix != ".py":
        return
    with suppress(OSError, SyntaxError, ValueError):
        for module, names in _imports_of(ast.parse(path.read_bytes())):
            if _is_installed(module):
                with suppress(Exception, SystemExit):
                    imported = importlib.import_module(module)
                    for name in names:  # some packages, such as transformers, import what is asked for
                        getattr(imported, name, None)


def _imports_of(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a script imports at its top, and the names that it takes from each."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, [alias.name for alias in node.names]


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to an installed package, and not to the user's own code."""
    root = name.partition(".")[0]
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(root)
        origin = spec.origin if spec is not None else None
        folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
        return origin is not None and any(Path(origin).is_relative_to(folder) for folder in folders)
    return False


# How a program is run


def _runner(command: Sequence[str]) -> Callable[[], object]:
    if command[0] == "-m":
        return lambda: _run_module(command[1], command[2:])
    path = Path(command[0])
    if path.suffix == ".py":
        return lambda: _run_script(path, command[1:])
    return lambda: _run_command(command)


def _run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a Python script as Python does, but in this process, and leave its globals for threads and finalizers."""
    sys.argv[:] = [str(path), *arguments]
    location = str(path.absolute())
    sys.path.insert(0, str(path.absolute().parent))
    module = ModuleType("__main__")
    module.__dict__.update(__file__=location, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), location, "exec"), module.__dict__)  # noqa: S102 - a user's own script


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = [name, *arguments]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_command(command: Sequence[str]) -> None:
    """Run a command as a child process, and wait for it; one that is cancelled has some seconds to end."""
    # Its lines are read while it runs, so that pruners see its losses.
    process = subprocess.Popen(command, env={"PYTHONUNBUFFERED": "1", **os.environ})
    try:
        status = process.wait()
    except Cancelled:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        process.kill()
        raise
    if status < 0:
        raise _Exit(f"{command[0]} was ended by signal {-status}")
    if status:
        raise _Exit(f"{command[0]} ended with status {status}")


def _finish() -> None:
    """End as Python does: wait for threads that are not daemons, and call the functions registered for the exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


# How it has ended


def _status_of(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or error.code == 0:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _cause_of(error: BaseException, interrupts: Interrupts) -> BaseException:
    """Return Cancelled instead of an error about the connection to a peer, if the evaluation was called off."""
    if any(text in str(error) for text in ECHOES):
        try:
            with interrupts.inside():
                time.sleep(_SECONDS_TO_BE_CANCELLED)
        except Cancelled as cancelled:
            return cancelled
    return error


def _failed(error: BaseException, path: Path, interrupts: Interrupts) -> dict[str, Any]:
    """Return the failure of a program as a step; what Python prints of an exception is printed."""
    reason = f"{type(error).__name__}: {with_hint(error)}"
    if isinstance(error, _Exit):
        reason = str(error)
    elif isinstance(error, SystemExit):
        is_text = error.code is not None and not isinstance(error.code, int)
        reason = f"{path.name} ended with status {_status_of(error)}"
        if is_text:
            print(error.code, file=sys.stderr)
    elif not isinstance(error, Cancelled):
        traceback.print_exception(type(error), error, _own(error.__traceback__, path))
    frames = frames_of(error)
    is_cancelled = isinstance(error, Cancelled) or interrupts.was_requested
    return {
        "failure": reason,
        "is_cancelled": is_cancelled,
        "is_status": isinstance(error, (_Exit, SystemExit)),
        "echo": any(text in reason for text in ECHOES),
        "gave_up": isinstance(error, RuntimeError) and any(text in reason for text in TIMEOUTS),
        "seconds": 0.0,
        "at": time.time(),
        "place": "" if isinstance(error, (_Exit, SystemExit)) else Places(path).of(frames),
        "traceback": stack_of(frames) if isinstance(error, Cancelled) else traceback_of(error, frames),
    }


def _own(found: Any, path: Path) -> Any:
    """Return the part of a traceback that begins in the script."""
    begin = found
    while begin is not None and begin.tb_frame.f_code.co_filename != str(path.absolute()):
        begin = begin.tb_next
    return begin or found
