"""Measure the first rank of runs with up to ten thousand workers, in virtual time.

    python -m benchmarks.scale

The first rank runs the real writer of the study, and answers the calls of all leaders. The leaders
are simulated (`tests.simulator`): each claims a trial, reports ten losses, ends the trial, and
reads the changes, in virtual time. Leaders of a host share the changes that they receive, as in
`hpo.store.study_client`. They do not learn from them.

The CPU time of the first rank is measured, and delays its answers. Each file operation takes 5 ms,
as on a parallel file system.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulator import mpi

mpi.install()  # before hpo is imported

from benchmarks.utilization import LOSSES  # noqa: E402
from benchmarks.writer import SPACE, make_writer  # noqa: E402
from hpo.ranks.communicator import SleepingComm  # noqa: E402
from hpo.ranks.rpc import RpcClient, RpcServer  # noqa: E402
from hpo.store.study_client import StudyClient  # noqa: E402
from tests.simulator.replacements import Replacements  # noqa: E402
from tests.simulator.scheduler import Process, Scheduler, Task  # noqa: E402

_LATENCY = 1e-5  # Mean seconds that a message takes.
_WORKERS_PER_HOST = 8
_OPERATION_SECONDS = 5e-3
_OPERATIONS = ("fsync", "symlink", "link", "rename", "replace", "unlink")


class MeasuringScheduler(Scheduler):
    """A scheduler for which the CPU time of one process passes as virtual time.

    Attributes:
        cpu: The CPU seconds of this process so far.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, preemption=0.0)
        self.measured = Process("rank 0", "host0")
        self.cpu = 0.0
        self._began = 0.0

    def sleep(self, seconds: float) -> None:
        """Let the current task sleep after the CPU time that it has used."""
        super().sleep(seconds + self._measure())

    def wait_for_event(self, limit: float) -> None:
        """Let the CPU time of the current task pass, and let it wait if nothing happens then."""
        events = self.process.events
        if used := self._measure():
            super().sleep(used)
        if self.process.events == events:
            super().wait_for_event(limit)

    def _measure(self) -> float:
        """Return the CPU seconds of the current task since it continued."""
        if self.process is not self.measured:
            return 0.0
        used = time.process_time() - self._began
        self.cpu += used
        return used

    def _continue(self, task: Task, number: int) -> None:
        self._began = time.process_time()
        super()._continue(task, number)


@dataclass
class Host:
    """A host, and the number of bytes of changes that its leaders have received."""

    received: int = 0


@dataclass
class Leader:
    """The leader of a worker: the calls of its evaluations, which take no time of their own."""

    study: StudyClient
    scheduler: Scheduler
    number: int
    host: Host
    waits: list[float] = field(default_factory=list)
    """Seconds between the end of an evaluation and the start of the next one."""
    busy: float = 0.0
    """Seconds in which it has evaluated."""

    def run(self, evaluations: int, seconds: float) -> None:
        """Evaluate, at times that differ from those of other leaders."""
        rng = random.Random(self.number)
        self.scheduler.sleep(seconds * rng.random())
        for generation in range(evaluations):
            began = self.scheduler.time
            self._read_changes()
            assignment = self._claim(rng, generation)
            self.waits.append(self.scheduler.time - began)
            self._evaluate(assignment, rng.expovariate(1 / seconds))

    def _read_changes(self) -> None:
        start = self.host.received
        changes = self.study.call.read_changes(start)
        self.host.received = max(self.host.received, start + len(changes))

    def _claim(self, rng: random.Random, generation: int) -> Any:
        place = {"island": 0, "worker": self.number, "propagator": "ga", "generation": generation}
        return self.study.claim(SPACE.draw(rng), **place)

    def _evaluate(self, assignment: Any, seconds: float) -> None:
        self.busy += seconds
        for step in range(1, LOSSES + 1):
            self.scheduler.sleep(seconds / LOSSES)
            self.study.notify.report(assignment, step, 1 / step)
        self.study.notify.complete(assignment, 1 / LOSSES, seconds, {"accuracy": 0.5})


def measure(folder: Path, workers: int, seconds: float, evaluations: int) -> str:
    """Simulate a run, and return its figures. Call it once in a process.

    Args:
        folder: Folder for the record.
        workers: Number of workers.
        seconds: Mean duration of an evaluation.
        evaluations: Number of evaluations of each worker.
    """
    scheduler = MeasuringScheduler(random.Random(workers))
    processes = [scheduler.measured, *(Process(f"rank {n}", "host") for n in range(1, workers + 1))]
    network = mpi.Network(scheduler, processes, _LATENCY, on_abort=_fail)
    writer = make_writer(folder, workers * evaluations)
    Replacements(scheduler, folder, 0.0, os._exit)
    _slow_files(scheduler)
    comm = SleepingComm(mpi.make_world(network, 0))  # type: ignore[arg-type]

    def settle() -> None:
        writer.commit_if_due()
        scheduler.sleep(0.0)  # The answers leave after the time that they took.

    server = RpcServer(comm, writer.answer, settle, writer.batch_writes(), _fail)
    scheduler.start(scheduler.measured, "answering", server._run)
    hosts = [Host() for _ in range(workers // _WORKERS_PER_HOST + 1)]
    leaders = []
    tasks = []
    for rank in range(1, workers + 1):
        client = _make_client(network, rank)
        leader = Leader(client, scheduler, rank - 1, hosts[rank // _WORKERS_PER_HOST])
        run = partial(leader.run, evaluations, seconds)
        leaders.append(leader)
        tasks.append(scheduler.start(processes[rank], "main", run))
    scheduler.run(lambda: all(task.body.dead for task in tasks))
    return _describe(leaders, seconds, scheduler, network)


def _make_client(network: mpi.Network, rank: int) -> StudyClient:
    client = RpcClient(SleepingComm(mpi.make_world(network, rank)))  # type: ignore[arg-type]
    return StudyClient(client.call, client.notify)


def _fail(*reasons: object) -> None:
    raise AssertionError(f"the first rank has ended: {reasons}")


def _slow_files(scheduler: Scheduler) -> None:
    """Let each file operation take 5 ms."""

    def slow(operate: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*arguments: Any, **options: Any) -> Any:
            scheduler.sleep(_OPERATION_SECONDS)
            return operate(*arguments, **options)

        return slowed

    for name in _OPERATIONS:
        setattr(os, name, slow(getattr(os, name)))


def _describe(
    leaders: list[Leader], seconds: float, scheduler: MeasuringScheduler, network: mpi.Network
) -> str:
    waits = sorted(wait for leader in leaders for wait in leader.waits)
    busy = sum(leader.busy for leader in leaders)
    count = len(waits)
    return (
        f"{len(leaders)} workers, {seconds:.0f} s: they evaluate in "
        f"{100 * busy / (busy + sum(waits)):.2f}% of the time; a claim takes "
        f"{1000 * waits[count // 2]:.0f} ms (median), {1000 * waits[int(0.99 * count)]:.0f} ms "
        f"(99th percentile); the first rank uses {1000 * scheduler.cpu / count:.2f} ms of CPU per "
        f"evaluation, {100 * scheduler.cpu / scheduler.time:.0f}% of a core; "
        f"{network.message_count / count:.1f} messages"
    )


def main() -> None:
    """Measure runs of several sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[250, 1000, 3000, 10000])
    parser.add_argument("--seconds", type=float, nargs="+", default=[120.0, 600.0])
    parser.add_argument("--evaluations", type=int, default=3, help="evaluations of each worker")
    chosen = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    for workers in chosen.workers:
        for seconds in chosen.seconds:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, fork.Pool(1) as pool:
                size = (workers, seconds, chosen.evaluations)
                print(pool.apply(measure, (Path(folder), *size)), flush=True)


if __name__ == "__main__":
    main()
