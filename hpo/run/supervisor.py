"""Starting a job again after a crash: the command `hpo supervise`, which outlives the MPI job that it looks after."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hpo.errors import ExitStatus, UsageError
from hpo.results.reader import RunReader
from hpo.store.run_dir import RunDir
from hpo.text_format import format_count

_FINAL_STATUSES = tuple(status for status in ExitStatus if status != ExitStatus.CRASHED)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.1
_SECONDS_OF_ONE_CTRL_C = 1.0
_LONGEST_PAUSE = 60.0
_SECONDS_TO_END = 30.0  # for what is left of a crashed job


class Supervisor:
    """Runs a job, and again with --resume when it has crashed, at most `restarts` times in a row without progress.

    `command` is mpirun's, or that of any launcher, and names the run's directory. `say` gets what a person should know.
    """

    def __init__(self, command: Sequence[str], restarts: int, print_message: Callable[[str], object]) -> None:
        if restarts < 0:
            raise UsageError(f"--max-restarts must be at least 0, not {restarts}")
        self._command = list(command)
        self._max_restarts = restarts
        self._print_message = print_message
        self._run_dir = Path(_find_option(command, "--run-dir") or _raise_missing_run_dir())
        self._storage = _find_option(command, "--storage")
        self._job: subprocess.Popen[bytes] | None = None
        self._stopped_at: float | None = None

    def run(self) -> int:
        """Run the job to an end that no restart would change, and return its exit status."""
        stops = [
            number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN
        ]  # as nohup ignores one
        before = {number: signal.signal(number, self._on_signal) for number in stops}
        try:
            return self._run_until_final()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_until_final(self) -> int:
        command, in_vain, (done, _) = self._command, 0, self._read_progress()
        while True:
            before, since = self._holder, time.time()
            status = self._run_once(command)
            died = self._holder not in ("", before)  # a run that ends by itself leaves no holder there
            if status in _FINAL_STATUSES and not died:
                return status
            if self._stopped_at is not None or (not died and self._has_concluded(since)):
                return ExitStatus.UNFINISHED
            now, in_flight = self._read_progress(otherwise=done)
            progress, done = now - done, now
            in_vain = in_vain + 1 if progress == 0 else 1
            crash = f"the job ended with status {status}, after {format_count(now, 'evaluation')}"
            crash += f", in {in_flight}" if in_flight else ""
            status = status or ExitStatus.CRASHED
            if in_vain > self._max_restarts:
                self._print_message(f"{crash}; started again {self._max_restarts} times without progress: giving up")
                return status
            without = f" ({in_vain} of {self._max_restarts} without progress)" if progress == 0 else ""
            self._print_message(f"{crash}; starting it again{without}")
            if not self._pause(compute_pause(in_vain)):
                return ExitStatus.UNFINISHED
            command = [*self._command, *(["--resume"] if "--resume" not in self._command else [])]

    def _run_once(self, command: Sequence[str]) -> int:
        try:
            # In a session of its own: a terminal's Ctrl-C comes here alone, and mpirun gets one signal and not two.
            self._job = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
        if self._stopped_at is not None:
            self._send_signal(os.kill, signal.SIGUSR1)
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = self._job.wait(_POLL_SECONDS)
                return status if status >= 0 else 128 - status

    @property
    def _holder(self) -> str:
        return RunDir(self._run_dir).holder

    def _has_concluded(self, since: float) -> bool:
        """Tell whether a run has stopped and summed up; its launcher may return the status of a killed rank."""
        run_dir = RunDir(self._run_dir)
        with suppress(OSError):
            return run_dir.summary_json.stat().st_mtime > since and bool(run_dir.read_summary().get("stopped"))
        return False

    def _read_progress(self, otherwise: int = 0) -> tuple[int, str]:
        """Return how many evaluations have ended by themselves, and which trials are in flight, if that can be read."""
        with suppress(Exception):  # a run that cannot be read now can be read later, or the job says why not
            run = RunReader(self._run_dir, self._storage)
            evaluations = [*run.read_evaluations(), *run.read_confirmations()]
            running = [evaluation.label for evaluation in evaluations if evaluation.state == "running"]
            trials = f"trial{'s' if len(running) > 1 else ''} {', '.join(running)}" if running else ""
            return sum(one.has_ended and not one.imported_from for one in evaluations), trials
        return otherwise, ""

    def _pause(self, seconds: float) -> bool:
        """Wait, and longer while what is left of the last job is in the run directory; false if asked to stop."""
        start = time.monotonic()
        while time.monotonic() < start + seconds or (
            RunDir(self._run_dir).is_in_use and time.monotonic() < start + _SECONDS_TO_END
        ):
            if self._stopped_at is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _on_signal(self, *_: int | FrameType | None) -> None:
        """Let the job stop; the second time, end it."""
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            self._send_signal(
                os.kill, signal.SIGUSR1
            )  # Open MPI's mpirun passes this one on; at others, it kills its ranks
        elif now - self._stopped_at > _SECONDS_OF_ONE_CTRL_C:
            self._send_signal(os.killpg, signal.SIGKILL)

    def _send_signal(self, send: Callable[[int, int], None], number: int) -> None:
        if self._job is not None and self._job.returncode is None:
            with suppress(ProcessLookupError):
                send(self._job.pid, number)


def compute_pause(in_vain: int) -> float:
    """Return the seconds to wait after so many crashes in a row without progress: ever more, up to a minute."""
    return min(2.0 ** min(in_vain - 1, 10), _LONGEST_PAUSE)


def _find_option(command: Sequence[str], name: str) -> str | None:
    """Return the last value of an option in a command line."""
    value = None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            value = following
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
    return value


def _raise_missing_run_dir() -> str:
    raise UsageError(
        "name the run's directory in the command, so that it can be resumed: "
        "hpo supervise mpirun -n 8 python run_islands.py --run-dir runs/NAME"
    )
