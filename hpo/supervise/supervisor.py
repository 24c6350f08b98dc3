"""Restart an MPI job after a crash: the command `hpo supervise`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpo.errors import ExitStatus, UsageError
from hpo.layout import Layout
from hpo.results.reader import RunReader
from hpo.store.run_dir import RunDir
from hpo.supervise.launchers import Launcher, find_launcher, find_option, set_option
from hpo.supervise.slurm import BatchHostGuard, start_silently
from hpo.text_format import format_count, format_duration

_SECONDS_TO_ANSWER = 15.0  # of a host
_FINAL_STATUSES = tuple(status for status in ExitStatus if status != ExitStatus.CRASHED)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_POLL_SECONDS = 0.1
_SECONDS_OF_ONE_CTRL_C = 1.0
_LONGEST_PAUSE = 60.0
_SECONDS_FOR_HOSTS = 3600.0  # to wait for hosts if too few are left for a worker
_SECONDS_TO_END = 30.0  # to wait for the remaining processes of a crashed job
_SECONDS_BETWEEN_CHECKS = 5.0
_SECONDS_FOR_LAUNCHER = 30.0  # to end after its run
# To wait for a lock of a lost host: servers of NFS 4 release it after 90 s.
_SECONDS_TO_RELEASE = 120.0


@dataclass(frozen=True)
class StartPlan:
    """How a job starts: its command line, and its hosts."""

    words: list[str]
    workers: int
    """Number of workers; 0 if the hosts that answer have too few ranks for one."""
    ranks: str = ""
    """The number of ranks and the hosts in words; an empty text if the hosts are not known."""
    missing: tuple[str, ...] = ()
    """The hosts that do not answer."""

    def list_lost_hosts(self, before: StartPlan) -> list[str]:
        """Return the hosts that do not answer now, and that the plan `before` has used."""
        return [host for host in self.missing if host not in before.missing]

    def describe(self, before: StartPlan) -> str:
        """Return in words how the job restarts, after it was started with the plan `before`."""
        lost = self.list_lost_hosts(before)
        text = f"{', '.join(lost)} do{'es' * (len(lost) == 1)} not answer; " if lost else ""
        if not self.workers:
            return f"{text}too few ranks are left for a worker; waiting for hosts"
        if self.missing or before.missing:
            return f"{text}restarting it with {self.ranks}"
        return f"{text}restarting it"


class Supervisor:
    """Runs a job, and restarts it with --resume when it crashes.

    There are at most `restarts` in a row without progress, which means that an evaluation has
    ended. The command is that of a launcher such as mpirun, with --run-dir.
    """

    def __init__(
        self, command: Sequence[str], restarts: int, print_message: Callable[[str], object]
    ) -> None:
        if restarts < 0:
            raise UsageError(f"--max-restarts must be at least 0, got {restarts}")
        self._command = list(command)
        self._max_restarts = restarts
        self._print_message = print_message
        run_dir = find_option(command, "--run-dir")
        if not run_dir:
            raise UsageError(
                "the command must have --run-dir, so that the run can be resumed, such as: "
                "hpo supervise mpirun -n 8 python run_islands.py --run-dir runs/NAME"
            )
        self._run_dir = RunDir(Path(run_dir))
        self._storage = find_option(command, "--storage")
        self._job: subprocess.Popen[bytes] | None = None
        self._stopped_at: float | None = None
        self._can_find_hosts = False

    def run(self) -> int:
        """Run the job, restart it after crashes, and return its final exit status."""
        # A signal may be ignored already, for example because of nohup.
        signals = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._on_signal) for number in signals}
        guard = BatchHostGuard(os.environ)
        try:
            return self._run_until_final(guard)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            guard.end()

    def _run_until_final(self, guard: BatchHostGuard) -> int:
        failed_starts = 0
        done, _ = self._read_progress()
        launcher = find_launcher(self._command, os.environ)
        if launcher is not None:
            self._can_find_hosts = can_find_live_hosts(launcher, self._is_stopped)
        plan = StartPlan(self._command, 1)
        while True:
            guard.restart(plan.missing)
            holder_before = self._run_dir.holder
            since = time.time()
            status = self._run_once(plan.words)
            # A run that ends normally removes its holder.
            has_crashed = self._run_dir.holder not in ("", holder_before)
            if status in _FINAL_STATUSES and not has_crashed:
                return status
            if self._is_stopped() or (not has_crashed and self._has_concluded(since)):
                return ExitStatus.UNFINISHED
            now, in_flight = self._read_progress(otherwise=done)
            progress = now - done
            done = now
            failed_starts = failed_starts + 1 if progress == 0 else 1
            crash = f"the job ended with status {status}, after {format_count(now, 'evaluation')}"
            crash += f", in {in_flight}" if in_flight else ""
            status = status or ExitStatus.CRASHED
            if failed_starts > self._max_restarts:
                self._print_message(
                    f"{crash}; gave up after {format_count(self._max_restarts, 'restart')} "
                    "without progress"
                )
                return status
            before = plan
            plan = self._plan_restart()
            if self._is_stopped():
                return ExitStatus.UNFINISHED
            lost = plan.list_lost_hosts(before)
            count = f" ({failed_starts} of {self._max_restarts} without progress)"
            self._print_message(f"{crash}; {plan.describe(before)}{count * (progress == 0)}")
            limit = _SECONDS_TO_RELEASE if lost else _SECONDS_TO_END
            if not self._pause(compute_pause(failed_starts), limit):
                return ExitStatus.UNFINISHED
            if lost and not self._run_dir.is_in_use:
                # The loss of a host is the cause, and not an evaluation.
                self._run_dir.mark_ended()
            plan = self._wait_for_hosts(plan)
            if not plan.workers:
                return ExitStatus.UNFINISHED if self._is_stopped() else status

    def _plan_restart(self) -> StartPlan:
        """Return how to resume the run: on all hosts of the job that answer."""
        words = set_option(self._command, "--resume")
        launcher = find_launcher(words, os.environ)
        if launcher is None or not self._can_find_hosts:
            return StartPlan(words, 1)
        given = find_option(words, "--ranks-per-worker")
        size = int(given) if given else Layout.choose(launcher.ranks, None, 1).ranks_per_worker
        return plan_start(launcher, size, self._is_stopped)

    def _wait_for_hosts(self, plan: StartPlan) -> StartPlan:
        """Return a plan with enough ranks for a worker; after a stop or an hour, the last plan."""
        if plan.workers:
            return plan
        end = time.monotonic() + _SECONDS_FOR_HOSTS
        while not plan.workers and time.monotonic() < end and self._pause(_LONGEST_PAUSE, 0):
            plan = self._plan_restart()
        text = f"restarting it with {plan.ranks}"
        if not plan.workers:
            waited = format_duration(_SECONDS_FOR_HOSTS)
            text = f"after {waited}, too few ranks are left for a worker; gave up"
        if not self._is_stopped():
            self._print_message(text)
        return plan

    def _is_stopped(self) -> bool:
        return self._stopped_at is not None

    def _run_once(self, command: Sequence[str]) -> int:
        try:
            # In another process session, Ctrl-C of the terminal reaches only this process, which
            # signals mpirun once.
            self._job = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from error
        if self._is_stopped():
            self._send_signal(os.kill, signal.SIGUSR1)
        is_launcher = Path(command[0]).name.startswith(("srun", "mpirun", "mpiexec"))
        end_watch = _EndWatch(self._run_dir)
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = self._job.wait(_POLL_SECONDS)
                return status if status >= 0 else 128 - status
            if is_launcher and end_watch.is_launcher_stuck():
                # It still waits for processes of a lost host, after the run has ended.
                self._send_signal(os.kill, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self._job.wait(_SECONDS_TO_END)
                self._send_signal(os.killpg, signal.SIGKILL)

    def _has_concluded(self, since: float) -> bool:
        """Return whether the run has stopped and written its summary after the time `since`.

        The exit status of the launcher does not show this reliably.
        """
        with suppress(OSError):
            is_new = self._run_dir.summary_json.stat().st_mtime > since
            return is_new and bool(self._run_dir.read_summary().get("stopped"))
        return False

    def _read_progress(self, otherwise: int = 0) -> tuple[int, str]:
        """Return how many evaluations have ended without an interruption, and the running trials.

        If the run cannot be read, the number is `otherwise`, and the text is empty.
        """
        # The run can perhaps be read later. Otherwise, the job prints the reason.
        with suppress(Exception):
            run = RunReader(self._run_dir.path, self._storage)
            evaluations = [*run.read_evaluations(), *run.read_confirmations()]
            ended = sum(one.has_ended and not one.imported_from for one in evaluations)
            running = [one.label for one in evaluations if one.state == "running"]
            trials = f"trial{'s' * (len(running) > 1)} {', '.join(running)}"
            return ended, trials if running else ""
        return otherwise, ""

    def _pause(self, seconds: float, limit: float) -> bool:
        """Wait for `seconds`, and up to `limit` seconds until the crashed job has ended.

        Return False at once if a signal asks to stop.
        """
        start = time.monotonic()
        while time.monotonic() < start + seconds or (
            self._run_dir.is_in_use and time.monotonic() < start + limit
        ):
            if self._is_stopped():
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _on_signal(self, *_: int | FrameType | None) -> None:
        """Stop the job at the first signal, and kill it at the second."""
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            # Mpirun of Open MPI forwards it. Other signals kill its ranks.
            self._send_signal(os.kill, signal.SIGUSR1)
        elif now - self._stopped_at > _SECONDS_OF_ONE_CTRL_C:
            self._send_signal(os.killpg, signal.SIGKILL)

    def _send_signal(self, send: Callable[[int, int], None], number: int) -> None:
        if self._job is not None and self._job.returncode is None:
            with suppress(ProcessLookupError):
                send(self._job.pid, number)


class _EndWatch:
    """Finds out by the lock of the run directory whether a run has ended before its launcher.

    srun of SLURM 22.05 waits forever for the tasks of a node that has restarted before SLURM found
    it to be down.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._next_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS
        self._was_locked = False
        self._ended_at: float | None = None

    def is_launcher_stuck(self) -> bool:
        """Return whether the run of this job has ended a while ago."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + _SECONDS_BETWEEN_CHECKS
        is_locked = self._run_dir.check_lock()
        self._was_locked |= bool(is_locked)
        if not self._was_locked or is_locked is not False:
            self._ended_at = None
            return False
        self._ended_at = self._ended_at or now
        return now - self._ended_at > _SECONDS_FOR_LAUNCHER


def compute_pause(failed_starts: int) -> float:
    """Return the seconds to wait after crashes in a row without progress: 1, 2, 4, at most 60."""
    return min(2.0 ** min(failed_starts - 1, 10), _LONGEST_PAUSE)


def plan_start(
    launcher: Launcher, ranks_per_worker: int, is_stopped: Callable[[], bool]
) -> StartPlan:
    """Return how to start a job on the hosts that answer, with as many ranks as form whole workers.

    If the user wants to stop, hosts are not waited for.
    """
    hosts = find_live_hosts(launcher, is_stopped)
    missing = tuple(host for host in launcher.capacities if host not in hosts)
    slots = sum(launcher.capacities[host] for host in hosts)
    workers = min(launcher.ranks, slots) // ranks_per_worker
    ranks = workers * ranks_per_worker
    text = f"{format_count(ranks, 'rank')} on {', '.join(hosts)}"
    if not workers:
        return StartPlan(launcher.words, 0, text, missing)
    words = launcher.restrict(hosts, ranks)
    if not missing:
        return StartPlan(words, workers, text)
    words = set_option(words, "--ranks-per-worker", ranks_per_worker)
    propagators = len((find_option(words, "--propagators") or "").split(","))
    if max(int(find_option(words, "--islands") or 0), propagators) > workers:
        words = set_option(words, "--islands", workers)
    return StartPlan(words, workers, text, missing)


def find_live_hosts(
    launcher: Launcher, is_stopped: Callable[[], bool] = lambda: False
) -> list[str]:
    """Return the hosts on which ranks can be started now. All are probed at the same time."""
    hosts = launcher.list_hosts()
    live = set()
    probes = {}
    for host in hosts:
        command = launcher.make_probe(host)
        if not command:
            live.add(host)
            continue
        with suppress(OSError):
            probes[host] = start_silently(command, os.environ)
    end = time.monotonic() + _SECONDS_TO_ANSWER
    while any(probe.poll() is None for probe in probes.values()):
        if time.monotonic() > end or is_stopped():
            break
        time.sleep(_POLL_SECONDS)
    for host, probe in probes.items():
        if probe.poll() is None:
            probe.kill()
            probe.wait()
        if probe.returncode == 0:
            live.add(host)
    return [host for host in hosts if host in live]


def can_find_live_hosts(launcher: Launcher, is_stopped: Callable[[], bool]) -> bool:
    """Return whether probes work here, because another host than this one answers.

    They do not work if, for example, the launcher connects to hosts in another way than by ssh.
    """
    return any(launcher.make_probe(host) for host in find_live_hosts(launcher, is_stopped))
