"""Run a program in a trainer: a Python script or module as `__main__`, or a command as a child process.

A trainer is the process that runs a program or an objective for one rank.
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
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType

import numpy as np
import torch

from hpo.process.failure import describe_status
from hpo.trainer.interrupts import Cancelled

_TERMINATION_SECONDS = 2.0  # A cancelled command has this time before it is killed.
# The second is the status of a shell whose last process has aborted.
_ABORT_STATUSES = (-signal.SIGABRT, 128 + signal.SIGABRT)


class ExitStatusError(Exception):
    """Raised if a command ends with a status other than 0, or by a signal. `is_abort` is whether it was SIGABRT."""

    def __init__(self, text: str, is_abort: bool) -> None:
        super().__init__(text)
        self.is_abort = is_abort


def reset_process() -> None:
    """Seed the random generators of this process with new seeds, and reset logging, before it runs a program."""
    # Forked processes would draw the same numbers, for example for batches and names of files.
    random.seed()
    np.random.seed()
    torch.seed()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def end_process() -> None:
    """Do the same as Python at exit: wait for non-daemon threads, call the functions of atexit, and flush files."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in gc.get_objects():
        with suppress(Exception):
            if isinstance(file, (io.TextIOWrapper, io.BufferedWriter)):
                file.flush()


def execute_program(command: Sequence[str], source: bytes | None) -> None:
    """Run a program to its end.

    Raises the exceptions of the program, and ExitStatusError if a command fails.

    Args:
        command: A Python script, or "-m" and a module, or another command; then its arguments.
        source: The content of the Python script; None to read the script from its file.
    """
    if command[0] == "-m":
        _run_module(command[1], command[2:])
    elif Path(command[0]).suffix == ".py":
        _run_script(Path(command[0]), command[1:], source)
    else:
        _run_command(command)


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

    The module stays in `sys.modules` afterwards, since threads, finalizers and spawned processes may use it.
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
