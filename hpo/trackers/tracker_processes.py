"""Start one process per tracker, so that trackers do not slow down the job.

Threads would slow down training, because a tracker's package holds the interpreter's lock for up to
2.5 s at its start and for 40 ms per evaluation (mlflow 3.17). In a thread, a package that hangs or
ends its process would also stop the rank.
"""

from __future__ import annotations

import json
import math
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
from hpo.process.linux import count_cpu_ticks
from hpo.process.standard_streams import warn
from hpo.store.run_dir import RunDir
from hpo.store.study import open_confirmations, open_existing_study

_ROOT = Path(hpo.__file__).parents[1]
_POLL_SECONDS = 0.2


class TrackerProcesses:
    """Processes, one per tracker, that follow studies until `finish` is called.

    `niceness` is added to that of this process. `notify` is called with each message for the user,
    of one line; default: print to stderr.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        niceness: int = 0,
        notify: Callable[[str], object] | None = None,
    ) -> None:
        started = [_start_process(name, run_dir, niceness, notify or warn) for name in names]
        self._processes = [process for process in started if process is not None]

    def add_study(self, storage: str, study: str) -> None:
        """Let the trackers also follow the study named `study` in `storage`."""
        for process in self._processes:
            process.send_study({"storage": storage, "study": study})

    def finish(self) -> None:
        """Let each tracker end after it has sent what the studies now contain. Does not wait."""
        for process in self._processes:
            process.finish()

    def wait(self, seconds: float = math.inf, idle_seconds: float = math.inf) -> bool:
        """Wait until all trackers have ended after `finish`. Return whether all succeeded.

        Trackers are killed that still run after `seconds`, or that use no CPU time for
        `idle_seconds`. On a busy host, the import of a package alone takes longer than a tracker
        that hangs may be waited for.
        """
        end = time.monotonic() + seconds
        ended = [process.wait(end, idle_seconds) for process in self._processes]
        return all(ended)


class _TrackerProcess:
    def __init__(
        self, name: str, run_dir: Path, niceness: int, notify: Callable[[str], object]
    ) -> None:
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
            start_new_session=True,  # Ctrl-C in a terminal must reach only the ranks.
            encoding="utf-8",
            errors="replace",
        )
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, own + niceness)
        self._listener = threading.Thread(
            target=self._forward_messages, name=f"tracker {name}", daemon=True
        )
        self._listener.start()

    def send_study(self, study: dict[str, str]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # The process has ended, and the listener prints the reason.
            self._process.stdin.write(json.dumps(study) + "\n")
            self._process.stdin.flush()

    def finish(self) -> None:
        """Close the pipe to the process, which means that no more studies follow."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, end: float, idle_seconds: float) -> bool:
        """Wait until the process has ended, or kill it. Return whether it succeeded.

        It is killed at `end`, or if it uses no CPU time for `idle_seconds`.
        """
        used = -1
        idle_since = now = time.monotonic()
        while self._listener.is_alive() and now < min(end, idle_since + idle_seconds):
            self._listener.join(min(_POLL_SECONDS, end - now))
            now = time.monotonic()
            if (ticks := count_cpu_ticks(self._process.pid)) != used:
                used = ticks
                idle_since = now
        if self._listener.is_alive():
            self._has_warned = True
            self._notify(
                f"warning: --tracker {self._name}: it did not finish in time. To send the missing "
                f"updates, use --resume or hpo track {self._run_dir} --tracker {self._name}"
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
                f"warning: --tracker {self._name}: its process ended with status {status}; it gets "
                "no more updates"
            )


def _start_process(
    name: str, run_dir: Path, niceness: int, notify: Callable[[str], object]
) -> _TrackerProcess | None:
    try:
        return _TrackerProcess(name, run_dir, niceness, notify)
    except OSError as error:
        notify(f"warning: --tracker {name}: it cannot be started: {error.strerror}")
        return None


def track_run(run_dir: Path, names: Sequence[str], storage: str | None) -> bool:
    """Send a run to trackers, without what they already have. Return whether all succeeded."""
    run_directory = RunDir(run_dir)
    run = run_directory.read_manifest()
    located = run_directory.locate_storage(storage or run.storage)
    # Raises an error before any process starts.
    open_existing_study(run_directory, located, run.study)
    tracking = TrackerProcesses(names, run_dir)
    tracking.add_study(located, run.study)
    if open_confirmations(located, run.study) is not None:
        tracking.add_study(located, run.confirmation_study)
    tracking.finish()
    return tracking.wait()
