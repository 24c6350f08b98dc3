"""The trackers of a run, each with a process of its own, which the job starts and does not wait for.

Threads would hinder the training: a package takes up to 2.5 s to begin with and 40 ms an evaluation (mlflow 3.17), in
which it holds the interpreter's lock; a package that hangs, or ends its process, would do the same to the rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import hpo.trackers
from hpo.store.run_dir import RunDir
from hpo.store.study import open_confirmations, open_existing_study
from hpo.text_format import make_printable

_ROOT = Path(hpo.__file__).parents[1]


class TrackerProcesses:
    """Follows the studies it is told of, until `finish`, and shows them to trackers by their names.

    `tell` gets, in one line, what a person should know.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, niceness: int = 0, notify: Callable[[str], object] | None = None
    ) -> None:
        started = [_start_process(name, run_dir, niceness, notify or _print_to_stderr) for name in names]
        self._processes = [process for process in started if process is not None]

    def add_study(self, storage: str, study: str) -> None:
        """Follow a study."""
        for process in self._processes:
            process.send_study({"storage": storage, "study": study})

    def finish(self) -> None:
        """Let trackers end when they have shown all that is in the studies by now."""
        for process in self._processes:
            process.finish()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for trackers to end after `finish`, for so many seconds at most; return whether all has been shown."""
        end = None if seconds is None else time.monotonic() + seconds
        ended = [process.wait(end) for process in self._processes]
        return all(ended)


class _TrackerProcess:
    """The process of one tracker."""

    def __init__(self, name: str, run_dir: Path, niceness: int, notify: Callable[[str], object]) -> None:
        self._name = name
        self._run_dir = run_dir
        self._notify = notify
        self._has_warned = False
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", hpo.trackers.__name__, name, str(run_dir)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for the ranks
            encoding="utf-8",
            errors="replace",
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        self._listener = threading.Thread(target=self._forward_messages, name=f"tracker {name}", daemon=True)
        self._listener.start()

    def send_study(self, study: dict[str, str]) -> None:
        """Send a study to follow."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and the listener says why
            self._process.stdin.write(json.dumps(study) + "\n")
            self._process.stdin.flush()

    def finish(self) -> None:
        """Tell the process that no more studies will come."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, end: float | None) -> bool:
        """Wait for the process to end, kill it where it takes too long, and return whether it has succeeded."""
        self._listener.join(None if end is None else max(0.0, end - time.monotonic()))
        if self._listener.is_alive():
            self._has_warned = True
            self._notify(
                f"warning: --tracker {self._name}: it did not come to an end; what is missing there is shown by a "
                f"--resume, or by hpo track {self._run_dir} --tracker {self._name}"
            )
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return self._process.returncode == 0

    def _forward_messages(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._has_warned |= line.startswith("warning")
                self._notify(line.rstrip())
        status = self._process.wait()
        if status and not self._has_warned:
            self._notify(
                f"warning: --tracker {self._name}: its process ended with status {status}; nothing more is shown there"
            )


def _start_process(name: str, run_dir: Path, niceness: int, notify: Callable[[str], object]) -> _TrackerProcess | None:
    try:
        return _TrackerProcess(name, run_dir, niceness, notify)
    except OSError as error:
        notify(f"warning: --tracker {name}: it cannot be started: {error.strerror}")
        return None


def _print_to_stderr(line: str) -> None:
    print(make_printable(line), file=sys.stderr, flush=True)


def track_run(run_dir: Path, names: Sequence[str], storage: str | None) -> bool:
    """Show a run to trackers, as far as they have not shown it already; return whether all has been shown."""
    run_directory = RunDir(run_dir)
    run = run_directory.read_manifest()
    located = run_directory.locate_storage(storage or run.storage)
    open_existing_study(run_directory, located, run.study)  # raises where something is wrong with it
    tracking = TrackerProcesses(names, run_dir)
    tracking.add_study(located, run.study)
    if open_confirmations(located, run.study) is not None:
        tracking.add_study(located, run.confirmation_study)
    tracking.finish()
    return tracking.wait()
