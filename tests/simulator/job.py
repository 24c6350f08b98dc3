"""Run one session of a search in this process, on simulated ranks, until it ends or is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpo.errors import CollectiveUsageError, ExitStatus, UsageError
from hpo.evaluation.host import Gpus, RankPlace
from hpo.layout import Layout
from hpo.options import Options
from hpo.problem import Problem, SearchDescription
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job, abort_for_error
from hpo.ranks.rank_watch import RankWatch
from hpo.run import prepare_rank, request, run_search
from hpo.space import SearchSpace
from hpo.store import run_dir
from tests.simulator import mpi
from tests.simulator.replacements import Replacements, pipes
from tests.simulator.scheduler import Process, Scheduler
from tests.simulator.trainers import ChooseBehavior, Site, Slot

_MOST_SECONDS = 20_000.0  # of virtual time, in which a session must end


@dataclass(frozen=True)
class Fault:
    """Something that happens to a job, besides the faults of objectives."""

    at: float
    """Virtual seconds since the start of the session."""
    kind: str
    """See `SimulatedJob._inject`."""
    rank: int


@dataclass(frozen=True)
class Plan:
    """The options of a session, and the faults in it."""

    seed: str
    ranks: int
    hosts: int
    options: Mapping[str, Any]
    """Fields of `hpo.options.Options`."""
    space: SearchSpace
    choose: ChooseBehavior
    latency: float
    """Mean seconds that a message takes."""
    preemption: float
    """Probability that another thread runs at a call of MPI, or at a flush of a file."""
    slowness: float
    """Mean seconds between an event and the reaction of a rank."""
    start: float
    """Virtual seconds between the start of the life and that of the session."""
    faults: Sequence[Fault]


@dataclass
class Outcome:
    """What can be seen of a session from outside, and what its ranks have done."""

    status: int | None = None
    """Exit status; None if the job was killed."""
    violation: str = ""
    """What the job should not have done; empty if it is all right."""
    is_killed: bool = False
    is_late: bool = False
    """Whether the watch has ended a job that was stopped, since some ranks did not end."""
    seconds: float = 0.0
    """Virtual seconds."""
    switches: int = 0
    messages: int = 0
    trace: str = ""
    printed: list[int] = field(default_factory=list)
    """Trials whose end was printed."""
    claimed: list[tuple[int, int]] = field(default_factory=list)
    """Number and worker of each trial that a leader has claimed."""
    begun: list[int] = field(default_factory=list)
    """First trials of the individuals whose objectives have begun."""
    warnings: list[str] = field(default_factory=list)
    """The messages of the watches."""
    synced: dict[int, int] = field(default_factory=dict)
    """Size of each file at its last flush, by inode."""


class SimulatedJob:
    """A job of simulated ranks. Each needs a process of its own, see `replacements`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._scheduler = Scheduler(self._rng, plan.preemption)
        self._outcome = Outcome()
        self._ranks = [
            Process(f"rank{rank}", f"host{rank * plan.hosts // plan.ranks}", slowness=plan.slowness)
            for rank in range(plan.ranks)
        ]
        self._network = mpi.Network(self._scheduler, self._ranks, plan.latency, self._abort)
        self._is_over = False
        self._statuses: dict[int, int] = {}
        self._site = Site(self._scheduler, plan.choose)
        self._replaced = Replacements(
            self._scheduler,
            plan.options["run_dir"],
            plan.start,
            self._exit_rank,
        )
        vars(run_search)["prepare_rank"] = self._prepare_rank

    def run(self) -> Outcome:
        """Run the session to its end."""
        scheduler = self._scheduler
        outcome = self._outcome
        for rank, process in enumerate(self._ranks):
            scheduler.start(process, "main", lambda rank=rank: self._run_rank(rank))  # type: ignore[misc]
        for fault in self._plan.faults:
            scheduler.call_at(fault.at, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        scheduler.run(lambda: self._is_over or scheduler.time > _MOST_SECONDS)
        if not self._is_over:
            text = f"the job has not ended after {scheduler.time:.0f} virtual seconds"
            outcome.violation = f"{text}\n{self._describe_tasks()}"
        outcome.seconds = scheduler.time
        outcome.switches = scheduler.switches
        outcome.messages = self._network.message_count
        outcome.trace = scheduler.trace
        if len({*self._statuses.values()}) > 1:
            outcome.violation = f"the statuses of the ranks are {self._statuses}"
        outcome.violation = outcome.violation or self._site.violation
        outcome.begun = self._site.begun
        outcome.warnings = self._replaced.warnings
        outcome.printed = self._replaced.printed
        outcome.claimed = self._replaced.claimed
        outcome.synced = self._replaced.synced
        return outcome

    def _describe_tasks(self) -> str:
        """Return the stack of each thread of each rank."""
        lines = []
        for process in self._ranks:
            for task in process.tasks:
                frames = traceback.extract_stack(task.body.gr_frame)
                own = [frame for frame in frames if "/tests/simulator/" not in frame.filename]
                places = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in own[-9:]]
                lines.append(f"{process.name} {task.name}: {' > '.join(places)}")
        return "\n".join(lines)

    # Faults

    def _inject(self, fault: Fault) -> None:
        self._scheduler.record(f"{fault.kind} {fault.rank};")
        process = self._ranks[fault.rank]
        acts: dict[str, Callable[[], None]] = {
            "kill job": self._kill_job,
            "kill at disk": lambda: self._kill_later("disk"),
            "kill at checkpoint": lambda: self._kill_later("checkpoint"),
            "kill rank": lambda: self._kill_rank(process),
            "lose host": lambda: self._lose_host(process.host),
            "suspend rank": lambda: self._suspend([process], self._rng.uniform(1.0, 8.0)),
            "suspend job": lambda: self._suspend(self._ranks, self._rng.uniform(1.0, 3000.0)),
            "second job": self._try_second_job,
            "disk": self._break_disk,
        }
        acts.get(fault.kind, lambda: self._signal_soon(fault.kind, process))()

    def _kill_job(self) -> None:
        self._outcome.is_killed = True
        self._is_over = True

    def _kill_later(self, kind: str) -> None:
        self._replaced.arm(kind, self._rng.randint(1, 12), self._kill_job_now)

    def _break_disk(self) -> None:
        self._replaced.failing_until = self._scheduler.time + self._rng.expovariate(1.0)

    def _kill_rank(self, process: Process) -> None:
        self._lose([process])
        self._end_job_soon(ExitStatus.CRASHED)

    def _lose_host(self, host: str) -> None:
        is_early = len(pipes) < len(self._ranks)  # While MPI starts, the launcher notices it.
        self._lose([process for process in self._ranks if process.host == host])
        if is_early or host == self._ranks[0].host:  # The launcher runs on the first host.
            self._end_job_soon(ExitStatus.CRASHED)

    def _signal_soon(self, name: str, receiver: Process) -> None:
        """Send a signal now, or when a trial has been claimed and its evaluation has not begun."""
        if self._rng.random() < 0.5:
            self._send_signal(name, receiver)
        else:
            self._replaced.arm(
                "claim", self._rng.randint(1, 5), lambda: self._send_signal(name, receiver)
            )

    def _send_signal(self, name: str, receiver: Process) -> None:
        """Send a signal to all ranks, as launchers do, or only to one."""
        receivers = self._ranks if self._rng.random() < 0.5 else [receiver]
        for process in receivers:
            if process.is_alive and process in pipes:
                pipes[process].add_signal(getattr(signal, name))

    def _kill_job_now(self) -> None:
        self._kill_job()
        self._scheduler.end_process()

    def _lose(self, processes: Sequence[Process]) -> None:
        for process in processes:
            process.is_alive = False
            self._site.end_trainers(process)
        if not any(process.is_alive for process in self._ranks):
            self._outcome.is_killed = True
            self._is_over = True

    def _suspend(self, processes: Sequence[Process], seconds: float) -> None:
        until = self._scheduler.time + seconds
        for process in processes:
            process.stopped_until = max(process.stopped_until, until)
        if len(processes) > 1:
            for trainer in self._site.trainers:
                trainer.process_state.stopped_until = until

    def _try_second_job(self) -> None:
        """Let another process enter the run directory, which must fail while this job holds it."""
        if not run_dir.held_locks.files:
            return
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                vars(run_dir)["time"] = SimpleNamespace(sleep=lambda _: None)
                with run_dir.RunDir(self._plan.options["run_dir"]).hold_lock():
                    pass
            except UsageError:
                status = 0
            finally:
                self._replaced.exit_now(status)
        if os.waitpid(pid, 0)[1]:
            self._outcome.violation = "a second job has entered the run directory"
            self._is_over = True

    def _abort(self, status: int) -> None:
        self._outcome.is_late = any("did not stop" in text for text in self._replaced.warnings)
        self._scheduler.record(f"abort {status};")
        self._end_job_soon(status)

    def _exit_rank(self, status: int) -> None:
        """Stand for `os._exit`, after which the launcher ends the job."""
        self._scheduler.record(f"exit {status};")
        self._end_job_soon(status or ExitStatus.CRASHED)
        self._scheduler.end_process()

    def _end_job_soon(self, status: int) -> None:
        """Let the launcher end all ranks. Until then, the others continue."""

        def end() -> None:
            self._outcome.status = status if self._outcome.status is None else self._outcome.status
            self._is_over = True

        self._scheduler.call_at(self._scheduler.time + self._rng.expovariate(5.0), end)

    # The main thread of a rank

    def _run_rank(self, rank: int) -> None:
        """Do what `hpo.cli.entry` does on a rank after the options are parsed."""
        world = SleepingComm(mpi.make_world(self._network, rank))  # type: ignore[arg-type]
        try:
            with RankWatch(world) as watch:
                options = Options(**self._plan.options)
                layout = Layout.choose(world.size, options.ranks_per_worker, options.islands)
                job = Job(world, watch, None, started_at=self._replaced.get_time_of_day())
                status = run_search.run_search(options, layout, job)
        except CollectiveUsageError as error:
            print(f"error: {error}", file=sys.stderr)
            status = ExitStatus.USAGE_ERROR
        except BaseException as error:
            abort_for_error(watch, error)
            raise
        self._statuses[rank] = status
        if len(self._statuses) == world.size:
            self._outcome.status = self._statuses[0]
            self._is_over = True

    @contextmanager
    def _prepare_rank(
        self, options: Options, layout: Layout, job: Job, **_: Any
    ) -> Iterator[prepare_rank.RankState]:
        """Stand for `hpo.run.prepare_rank.prepare_rank`: without templates and search files."""
        description = SearchDescription(
            options.search_space, options.search_space, b"", self._plan.space
        )

        def ask(kind: str, **_: Any) -> dict[str, Any]:
            is_load = kind == "load"
            return description.data if is_load else {"values": {}, "unsafe": "", "skipped": {}}

        made = None
        if job.is_first:
            made = request.make_request(options, layout, ask, None)  # type: ignore[arg-type]
        process = self._scheduler.process
        place = RankPlace(int(process.host.removeprefix("host")), process.host, Gpus())
        slot: Any = Slot(self._site, process)
        job.world.barrier()
        yield prepare_rank.RankState(made, Problem(description, {}), place, slot)
