"""Run many tasks in one thread, in virtual time and in an order that a seed decides.

A task is a greenlet. It runs until it waits, and then the scheduler chooses which task continues.
Virtual time passes only while all tasks wait.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet


@dataclass(eq=False)
class Process:
    """A simulated process. Its tasks are its threads."""

    name: str
    host: str
    tasks: list[Task] = field(default_factory=list)
    is_alive: bool = True
    events: int = 0
    """Number of events so far."""
    stopped_until: float = 0.0
    """Time until which the process is suspended."""
    slowness: float = 0.0
    """Mean seconds between an event and the time at which a waiting task continues."""


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    process: Process
    name: str
    body: Any
    """The greenlet."""
    thread: object = None
    """What stands for the thread in the replaced modules."""
    waits_for_event: bool = False
    wakeup: int = 0
    """Number of the wakeup that continues the task. Earlier ones have no effect."""


class Scheduler:
    """Chooses which task continues, and when.

    Args:
        rng: Makes all choices.
        preemption: Probability that another task runs at a call of `preempt`.

    Attributes:
        time: The virtual time in seconds.
        current: The task that is running.
        switches: The number of times that a task has continued.
    """

    def __init__(self, rng: random.Random, preemption: float) -> None:
        self.rng = rng
        self.time = 0.0
        self.switches = 0
        self.current: Task | None = None
        self._preemption = preemption
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._hub = getcurrent()
        self._trace = hashlib.sha256()

    @property
    def process(self) -> Process:
        """The process that is running."""
        assert self.current is not None
        return self.current.process

    @property
    def trace(self) -> str:
        """A digest of all that has happened: which task continued at which time."""
        return self._trace.hexdigest()[:16]

    def record(self, text: str) -> None:
        """Add an event to the trace."""
        self._trace.update(text.encode())

    def start(self, process: Process, name: str, run: Callable[[], object]) -> Task:
        """Start a thread of a process."""
        task = Task(process, name, greenlet(run, parent=self._hub))
        process.tasks.append(task)
        self._wake_at(task, self.time)
        return task

    def call_at(self, time: float, act: Callable[[], None]) -> None:
        """Call a function at a virtual time. Functions of the same time have a random order."""
        heapq.heappush(self._events, (time, self.rng.random(), next(self._numbers), act))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run all tasks until `is_over()` is true, or nothing is left to happen."""
        while self._events and not is_over():
            time, _, _, act = heapq.heappop(self._events)
            self.time = max(self.time, time)
            act()

    # Called by tasks

    def sleep(self, seconds: float) -> None:
        """Let the current task sleep."""
        assert self.current is not None
        self._wake_at(self.current, self.time + seconds)
        self._hub.switch()

    def wait(
        self, done: Callable[[], bool], limit: float = math.inf, interval: float = math.inf
    ) -> bool:
        """Let the current task wait until `done()` is true; return false after `limit` seconds.

        It is called again after each event of the process, and after `interval` seconds if it
        depends on the time.
        """
        process = self.process
        until = self.time + limit
        while True:
            seen = process.events
            if done():
                return True
            if self.time >= until:
                return False
            if process.events == seen:  # `done` may let other tasks run.
                self.wait_for_event(min(until - self.time, interval))

    def wait_for_event(self, limit: float) -> None:
        """Let the current task wait for an event of its process, for at most `limit` seconds."""
        task = self.current
        assert task is not None
        task.waits_for_event = True
        task.wakeup += 1
        if math.isfinite(limit):
            self._wake_at(task, self.time + limit)
        self._hub.switch()

    def end_process(self) -> None:
        """End the current process. This method does not return."""
        self.process.is_alive = False
        self._hub.switch()

    def preempt(self) -> None:
        """Perhaps let other tasks run before the current one continues."""
        if self.rng.random() < self._preemption:
            self.sleep(self.rng.expovariate(1000.0))

    def notify(self, process: Process) -> None:
        """Let all waiting tasks of a process check their conditions."""
        process.events += 1
        for task in process.tasks:
            if task.waits_for_event:
                task.waits_for_event = False
                self._wake_at(task, self.time)

    # Called by the hub

    def _wake_at(self, task: Task, time: float) -> None:
        task.wakeup += 1
        number = task.wakeup
        if task.process.slowness:
            time += self.rng.expovariate(1 / task.process.slowness)
        self.call_at(time, lambda: self._continue(task, number))

    def _continue(self, task: Task, number: int) -> None:
        process = task.process
        if task.wakeup != number or not process.is_alive:
            return
        if self.time < process.stopped_until:
            self.call_at(process.stopped_until, lambda: self._continue(task, number))
            return
        task.waits_for_event = False
        self.switches += 1
        self.record(f"{process.name}/{task.name}@{self.time:.6f};")
        self.current = task
        task.body.switch()
        self.current = None
        if task.body.dead:
            process.tasks.remove(task)
            self.notify(process)
