"""Replace what depends on real time, threads, processes and disks, in the modules of hpo.

The modules themselves run unchanged. Their functions are replaced for good, so this belongs into a
process of its own.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hpo.evaluation import rank_group, supervision
from hpo.process import clock
from hpo.ranks import communicator, rank_watch, rpc
from hpo.run import first_rank, leader_stages
from hpo.store import study_client
from hpo.views import progress
from tests.simulator.scheduler import Process, Scheduler, Task

_EPOCH = 1_700_000_000.0  # The time of day at which each life begins.
# Conditions of an evaluation depend on the time, too.
_SECONDS_BETWEEN_CHECKS = 0.5
_POLL_SECONDS = 0.5  # of the watch, which polls five times as often in reality
_SECONDS_TO_COMMIT = 0.1  # after which the writer looks whether a commit is due
_DAMAGE = OSError(5, "Input/output error")


class Replacements:
    """The replaced functions of one job.

    Attributes:
        failing_until: The virtual time until which flushes of files fail.
        synced: The size of each file at its last flush, by inode.
        warnings: The messages of the watch.
        printed: The trials whose end was printed.
        claimed: The number and the worker of each trial that a leader has claimed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        run_dir: Path,
        start: float,
        exit_process: Callable[[int], None],
    ) -> None:
        self._run_dir = run_dir
        self._armed: dict[str, tuple[int, Callable[[], None]]] = {}
        self._scheduler = scheduler
        self._start = start
        self._clocks: dict[Process, clock.Clock] = {}
        self.exit_now = os._exit
        self.failing_until = 0.0
        self.synced: dict[int, int] = {}
        self.warnings: list[str] = []
        self.printed: list[int] = []
        self.claimed: list[tuple[int, int]] = []
        self._replace_time()
        self._replace_threads()
        self._replace_operating_system(exit_process)
        self._observe_results()

    def arm(self, kind: str, count: int, act: Callable[[], None]) -> None:
        """Call `act` at the event number `count` of a kind, from now on.

        Kinds are "disk" and "checkpoint", directly before or after the disk, or a checkpoint on it,
        changes; and "claim", when a leader has claimed a trial.
        """
        assert kind not in self._armed
        self._armed[kind] = (count, act)

    def _pass_event(self, kind: str) -> None:
        if kind in self._armed:
            count, act = self._armed.pop(kind)
            if count == 1:
                act()
            else:
                self._armed[kind] = (count - 1, act)

    def get_time_of_day(self) -> float:
        """Return the virtual time in seconds since the epoch."""
        return _EPOCH + self._start + self._scheduler.time

    def _replace_time(self) -> None:
        scheduler = self._scheduler
        times = _copy_module(time)
        times.monotonic = lambda: scheduler.time + 1000.0
        times.time = self.get_time_of_day
        times.process_time = lambda: 0.0
        times.sleep = scheduler.sleep
        _replace_in_modules("time", time, times)
        dates = _make_date_class(self.get_time_of_day)
        calendars = _copy_module(sys.modules["datetime"])
        calendars.datetime = dates
        _replace_in_modules("datetime", datetime, dates)
        _replace_in_modules("datetime", sys.modules["datetime"], calendars)
        _replace(communicator, "sleep_until", scheduler.wait)
        wait_for_time = partial(scheduler.wait, interval=_SECONDS_BETWEEN_CHECKS)
        _replace(supervision, "sleep_until", wait_for_time)
        _replace(rpc, "sleep_briefly", lambda *_: scheduler.wait_for_event(_SECONDS_TO_COMMIT))
        _replace(clock, "now", lambda: self._get_clock().now())
        _replace(clock, "measure_lost", lambda: self._get_clock().measure_lost())

    def _get_clock(self) -> clock.Clock:
        process = self._scheduler.process
        if process not in self._clocks:
            own = clock.Clock()
            own._lock = nullcontext()  # type: ignore[assignment]
            self._clocks[process] = own
        return self._clocks[process]

    def _replace_threads(self) -> None:
        scheduler = self._scheduler
        threads = _copy_module(threading)
        threads.Thread = lambda **options: Thread(scheduler, **options)
        threads.Lock = lambda: Lock(scheduler)
        threads.Event = lambda: Event(scheduler)
        threads.current_thread = lambda: scheduler.current and scheduler.current.thread
        _replace_in_modules("threading", threading, threads)
        _replace(rank_watch, "_POLL_SECONDS", _POLL_SECONDS)
        _replace(rank_watch, "_WakeupPipe", lambda: WakeupPipe(scheduler))

    def _replace_operating_system(self, exit_process: Callable[[int], None]) -> None:
        scheduler = self._scheduler
        _replace(socket, "gethostname", lambda: scheduler.process.host)
        _replace(leader_stages, "identify_pid_namespace", lambda: scheduler.process.host)
        _replace(rank_group, "_find_source_address", lambda _: "127.0.0.1")
        _replace(rank_group, "find_interface", lambda _: "lo")
        _replace(os, "_exit", exit_process)
        write_event = os.eventfd_write

        def write(descriptor: int, value: int) -> None:
            write_event(descriptor, value)
            scheduler.notify(scheduler.process)

        _replace(os, "eventfd_write", write)
        _replace(os, "fsync", self._flush)
        for name in ("unlink", "replace", "rename", "symlink", "truncate"):
            _replace(os, name, self._observe_disk(getattr(os, name)))

    def _observe_disk(self, change: Callable[..., None]) -> Callable[..., None]:
        def observed(path: Any, *arguments: Any, **options: Any) -> None:
            if isinstance(path, (str, Path)) and Path(path).is_relative_to(self._run_dir):
                is_checkpoint = "checkpoints" in Path(path).parts
                self._pass_disk_event(is_checkpoint)
                change(path, *arguments, **options)
                self._pass_disk_event(is_checkpoint)
            else:
                change(path, *arguments, **options)

        return observed

    def _pass_disk_event(self, is_checkpoint: bool = False) -> None:
        """Perhaps let other tasks run, or end the job, before or after a change of the disk."""
        self._scheduler.preempt()
        self._pass_event("disk")
        if is_checkpoint:
            self._pass_event("checkpoint")

    def _flush(self, descriptor: int) -> None:
        self._pass_disk_event()
        if self._scheduler.time < self.failing_until:
            raise _DAMAGE
        status = os.fstat(descriptor)
        self.synced[status.st_ino] = status.st_size
        self._pass_disk_event()

    def _observe_results(self) -> None:
        """Note what is claimed and printed, and leave out what takes long and is not simulated."""
        warn: Any = vars(rank_watch)["warn"]
        make_summary: Any = vars(first_rank)["Summary"]
        format_line = progress.ProgressLines.format_line
        claim = study_client.StudyClient.claim

        def note_warning(text: str) -> None:
            self.warnings.append(text)
            warn(text)

        def make_plain_summary(*given: Any, **options: Any) -> Any:
            return make_summary(*given, **{**options, "ask_models": False})

        def note_line(lines: Any, evaluation: Any) -> str:
            if evaluation.confirms is None:
                self.printed.append(evaluation.trial)
            return format_line(lines, evaluation)

        def note_claim(client: Any, params: Any, **attributes: Any) -> Any:
            assignment = claim(client, params, **attributes)
            if assignment is not None and assignment.confirms is None:
                self.claimed.append((assignment.number, attributes["worker"]))
                self._pass_event("claim")
            return assignment

        _replace(rank_watch, "warn", note_warning)
        _replace(first_rank, "finalize_run", lambda *_, **__: None)
        _replace(first_rank, "Summary", make_plain_summary)
        _replace(progress.ProgressLines, "format_line", note_line)
        _replace(study_client.StudyClient, "claim", note_claim)


def _replace(owner: Any, name: str, value: object) -> None:
    """Set an attribute, which must exist."""
    getattr(owner, name)
    setattr(owner, name, value)


def _copy_module(module: ModuleType) -> Any:
    copied = ModuleType(module.__name__)
    vars(copied).update(vars(module))
    return copied


def _replace_in_modules(name: str, before: object, after: object) -> None:
    """Replace an imported name in all modules of hpo, and of Optuna, which dates trials."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("hpo.", "optuna.")) and vars(module).get(name) is before:
            setattr(module, name, after)


def _make_date_class(get_time_of_day: Callable[[], float]) -> type:
    class Date(datetime):
        """A date, whose `now` is virtual."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(get_time_of_day(), tz)

    return Date


class Thread:
    """A thread of the process that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., object],
        name: str = "thread",
        args: Sequence[Any] = (),
        daemon: bool = True,  # noqa: ARG002 - a simulated process ends with its main thread
    ) -> None:
        self._scheduler = scheduler
        self._run = lambda: target(*args)
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        """Start the thread."""
        self._task = self._scheduler.start(self._scheduler.process, self._name, self._run)
        self._task.thread = self

    def join(self) -> None:
        """Wait until the thread has ended."""
        task = self._task
        assert task is not None
        self._scheduler.wait(lambda: bool(task.body.dead))


class WakeupPipe:
    """Stands for the pipe by which signals and other threads wake the watch."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._process = scheduler.process
        self._signals: list[int] = []
        self._is_woken = False
        pipes[self._process] = self

    def __enter__(self) -> WakeupPipe:
        return self

    def __exit__(self, *_: object) -> None:
        pipes.pop(self._process, None)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most `seconds` for a signal or for `wake`; return the numbers of new signals."""
        self._scheduler.wait(lambda: self._is_woken or bool(self._signals), seconds)
        self._is_woken = False
        signals = self._signals
        self._signals = []
        return signals

    def wake(self) -> None:
        """End the wait of the watch."""
        self._is_woken = True
        self._scheduler.notify(self._process)

    def add_signal(self, number: int) -> None:
        """Let a signal arrive."""
        self._signals.append(number)
        self._scheduler.notify(self._process)


pipes: dict[Process, WakeupPipe] = {}
"""The pipes of the processes that handle signals."""


class Lock:
    """A lock for which tasks wait in virtual time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_locked = False
        self._waiting = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Wait until the lock is free, and take it; return false if it is not free at once."""
        if self._is_locked and not blocking:
            return False
        self._waiting += 1
        self._scheduler.wait(lambda: not self._is_locked)
        self._waiting -= 1
        self._is_locked = True
        return True

    def release(self) -> None:
        """Free the lock."""
        self._is_locked = False
        if self._waiting:
            self._scheduler.notify(self._scheduler.process)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """An event for which tasks wait in virtual time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        """Let the event happen."""
        self._is_set = True
        self._scheduler.notify(self._scheduler.process)

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self._is_set

    def wait(self, seconds: float) -> bool:
        """Wait for the event; return false after `seconds`."""
        return self._scheduler.wait(self.is_set, seconds)
