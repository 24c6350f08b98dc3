"""Simulated trainers: they report losses, crash, hang, disagree, and end late.

A trainer is a process of its own, and talks to its rank as a real one does
(`hpo.trainer.objective_runner`).
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.evaluation.trainer_client import TrainerEnd, TrainerOutput
from hpo.process.channel import Message
from hpo.process.messages import EvaluationRequest, ObjectiveEnd, Report
from hpo.store.checkpoints import read_checkpoint_info
from tests.simulator.scheduler import Process, Scheduler, Task

# A draft of a checkpoint with one tensor of four bytes.
_HEADER = json.dumps(
    {
        "__metadata__": {"tree": json.dumps(None)},
        "state/x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    }
).encode()
_DRAFT = len(_HEADER).to_bytes(8, "little") + _HEADER + b"abcd"


@dataclass(frozen=True)
class Behavior:
    """The behavior of the objective with one individual."""

    losses: tuple[float, ...]
    seconds: float
    """Mean seconds of a step."""
    fault: str = ""
    """What goes wrong; empty if nothing does. See `FAULTS`."""
    fault_step: int = 0
    fault_rank: int = 0
    """Rank on which it goes wrong, modulo the number of ranks."""
    saves: bool = False


ChooseBehavior = Callable[[int], Behavior]
"""Returns what the objective does, given the first trial of the individual."""
FAULTS = (
    "raise",  # An exception.
    "crash",  # The process ends by a signal.
    "hang",  # It reports nothing more, but an interrupt ends it.
    "stuck",  # As "hang", and no interrupt ends it.
    "nan",  # The loss is not finite.
    "disagree",  # The losses of the ranks differ.
    "linger",  # After its end, the process is not idle for a minute.
    "early",  # The process ends before it has joined the group.
    "return",  # One rank returns before the others.
)


def choose_behavior(seed: str, fault_share: float, evaluation_seconds: float) -> Behavior:
    """Return what the objective does, which depends on the seed alone."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    best = rng.random()
    losses = tuple(best + 1 / (step + 1) for step in range(count))
    fault = rng.choice(FAULTS) if rng.random() < fault_share else ""
    return Behavior(
        losses,
        rng.expovariate(1 / evaluation_seconds) / count,
        fault,
        rng.randrange(count),
        rng.randrange(8),
        saves=rng.random() < 0.7,
    )


class CancelledError(Exception):
    """The rank has interrupted the objective."""


class PeerLostError(Exception):
    """Another rank of the worker has ended."""


class TimedOutError(Exception):
    """Another rank of the worker has not come in time."""


@dataclass(eq=False)
class Group:
    """The process group of a worker's trainers."""

    size: int
    timeout: float
    members: dict[int, Trainer] = field(default_factory=dict)
    arrived: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def is_broken(self) -> bool:
        """Return whether a member has ended."""
        return any(not member.process_state.is_alive for member in self.members.values())


@dataclass
class Site:
    """What all trainers of a job share.

    Attributes:
        begun: The first trials of the individuals of the search whose objectives have begun.
        violation: How trainers were used wrongly; empty if they were not.
    """

    scheduler: Scheduler
    choose: ChooseBehavior
    groups: dict[str, Group] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    active: dict[str, Trainer] = field(default_factory=dict)
    """The trainers of rank 0, by the name of the individual that they evaluate."""
    violation: str = ""

    def begin_evaluation(self, trainer: Trainer, request: EvaluationRequest) -> None:
        """Note that an objective begins on rank 0 of a worker."""
        name = Path(request.folder).name  # The names of confirmations have a prefix.
        other = self.active.get(name)
        if other not in (None, trainer):
            self.violation = f"two workers evaluate the individual {name} at the same time"
        self.active[name] = trainer
        if name == str(request.trial):
            self.begun.append(request.trial)

    def end_evaluation(self, trainer: Trainer) -> None:
        """Note that the objective of a trainer has ended."""
        self.active = {name: one for name, one in self.active.items() if one is not trainer}

    def end_trainers(self, owner: Process) -> None:
        """End the trainers of a rank that is lost."""
        for trainer in self.trainers:
            if trainer.owner is owner:
                trainer.kill()


class Trainer:
    """A simulated trainer, with the methods of `hpo.evaluation.trainer_client.TrainerClient`."""

    def __init__(self, site: Site, owner: Process) -> None:
        site.trainers.append(self)
        self.process = 100_000 + len(site.trainers)
        self.process_state = Process(f"trainer{len(site.trainers)}", owner.host)
        self.has_started = False
        self.has_lost_template = False
        self.is_killed = False
        self._site = site
        self._scheduler = site.scheduler
        self.owner = owner
        self._inbox: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._outbox: deque[Message] = deque()
        self._end: TrainerEnd | None = None
        self._interrupts = 0
        self._is_interruptible = True
        self._group: Group | None = None
        self._rank = 0
        self._evaluation = 0
        self._task: Task = self._scheduler.start(self.process_state, "main", self._run)

    # The methods that ranks call

    def send(self, kind: str, _descriptors: Sequence[int] = (), /, **content: Any) -> None:
        """Send a request to the trainer."""
        # As JSON, so that both share nothing.
        self._inbox.append((kind, json.loads(json.dumps(content))))
        self._scheduler.notify(self.process_state)

    def wait(self, timeout: float | None = None, *others: Any) -> Message | TrainerEnd | None:
        """Wait for the next message, as the real one does."""
        watched = [other for other in others if hasattr(other, "take_news")]

        def is_ready() -> bool:
            return bool(self._outbox or self._end) or any(map(_has_event, watched))

        self._scheduler.wait(is_ready, math.inf if timeout is None else timeout)
        if self._outbox:
            return self._outbox.popleft()
        return self._end

    def interrupt(self) -> None:
        """Raise an exception in the objective."""
        self._interrupts += 1
        self._scheduler.notify(self.process_state)

    def kill(self) -> None:
        """Kill the process."""
        if not self.is_killed:
            self.is_killed = True
            self._exit(-signal.SIGKILL)

    def discard(self) -> None:
        """Kill the process, and close the connection."""
        self.kill()

    def close(self) -> None:
        """Close the connection, so that the process ends."""
        self._exit(0)

    def wait_for_exit(self) -> None:
        """Wait until the process has ended."""

    def find_stack(self) -> Sequence[Any]:
        """Return no stack."""
        return ()

    def read_thread_state(self) -> tuple[bool, int]:
        """Return that the process computes."""
        return False, int(self._scheduler.time * 100)

    def read_output(self) -> None:
        """Read nothing: simulated trainers print nothing."""

    def has_watchdog_aborted(self, _: TrainerEnd) -> bool:
        """Return false, since NCCL is not used."""
        return False

    def describe_last_error(self) -> str:
        """Return that nothing was printed."""
        return ""

    # The trainer itself

    def _exit(self, status: int) -> None:
        if not self.process_state.is_alive:
            return
        self.process_state.is_alive = False
        self._site.end_evaluation(self)
        self._end = TrainerEnd(f"the trainer ended with status {status}", (), status)
        self._scheduler.notify(self.owner)
        if self._group is not None:
            for member in self._group.members.values():
                self._scheduler.notify(member.process_state)

    def _run(self) -> None:
        self._scheduler.sleep(self._scheduler.rng.expovariate(20.0))
        self.has_started = True
        while True:
            self._scheduler.wait(lambda: bool(self._inbox))
            kind, content = self._inbox.popleft()
            if kind == "evaluate":
                self._evaluate(EvaluationRequest.decode(content))

    def _evaluate(self, request: EvaluationRequest) -> None:
        self._evaluation += 1
        behavior = self._site.choose(request.trial)
        if request.ticket is not None:
            self._join(request)
        assert self._group is not None
        size = self._group.size
        has_fault = behavior.fault_rank % size == self._rank
        if behavior.fault == "early" and has_fault:
            self._die()
        try:
            self._meet(-1, "join")
        except (CancelledError, PeerLostError, TimedOutError) as error:
            self._put("end", **vars(self._describe(error)))
            self._put("idle", is_clean=False)
            return
        self._put("joined", free_memory=0, warning="")
        if self._rank == 0:
            self._site.begin_evaluation(self, request)
        self._is_interruptible = True
        self._interrupts = 0
        try:
            end = self._train(request, behavior, has_fault)
        except CancelledError as error:
            self._put("interrupted", frames=[])
            end = self._describe(error)
        except (PeerLostError, TimedOutError) as error:
            end = self._describe(error)
        self._site.end_evaluation(self)
        self._put("end", **vars(end))
        if behavior.fault == "linger" and has_fault:
            self._scheduler.sleep(60.0)
        self._put("idle", is_clean=True)

    def _join(self, request: EvaluationRequest) -> None:
        ticket = request.ticket
        assert ticket is not None
        group = self._site.groups.setdefault(ticket.name, Group(ticket.size, ticket.timeout))
        self._group = group
        self._rank = ticket.rank
        group.members[ticket.rank] = self

    def _train(
        self, request: EvaluationRequest, behavior: Behavior, has_fault: bool
    ) -> ObjectiveEnd:
        done = 0
        has_resumed = False
        if request.checkpoint is not None and behavior.saves:
            done = len(read_checkpoint_info(Path(request.checkpoint)).losses)
            has_resumed = True
        for step in range(done, len(behavior.losses)):
            self._compute(behavior.seconds)
            fault = behavior.fault if has_fault and step == behavior.fault_step else ""
            if fault in ("hang", "stuck"):
                self._is_interruptible = fault == "hang"
                self._compute(math.inf)
            if fault == "raise":
                return ObjectiveEnd(failure="RuntimeError: simulated", at=self._scheduler.time)
            if fault == "crash":
                self._die()
            if fault == "return":
                nothing = ObjectiveEnd(failure="ValueError: it yielded no loss")
                return ObjectiveEnd(has_resumed=has_resumed) if step else nothing
            is_last = step + 1 == len(behavior.losses)
            if fault == "nan":
                text = "ValueError: the loss is nan"
                return ObjectiveEnd(failure=text, diverged=True, at=self._scheduler.time)
            differs = behavior.fault == "disagree" and step == behavior.fault_step
            report = Report(
                behavior.losses[step],
                mistake="the ranks yielded different losses" if differs else "",
                is_last=is_last,
                has_saved=behavior.saves,
                has_resumed=has_resumed,
            )
            if not self._report(step, report):
                break
        return ObjectiveEnd(has_resumed=has_resumed)

    def _report(self, step: int, report: Report) -> bool:
        """Agree on a report with the other ranks, and return whether the objective continues."""
        group = self._group
        assert group is not None
        self._meet(step, "report")
        number = self._evaluation * 1000 + step
        if self._rank == 0:
            self._put("report", **vars(report))
            # The answer is not interrupted, as in a real trainer.
            self._scheduler.wait(lambda: bool(self._inbox))
            _, answer = self._inbox.popleft()
            group.answers[number] = answer
            for member in group.members.values():
                self._scheduler.notify(member.process_state)
            if answer["saves_checkpoint"] or answer["keeps_weights"]:
                self._put("kept", [_write_draft()], kinds=["checkpoint"], errors={})
        else:
            self._wait(lambda: number in group.answers)
            self._put("reported")
        return bool(group.answers[number]["continues"])

    def _meet(self, step: int, what: str) -> None:
        """Wait until all ranks of the group are here."""
        group = self._group
        assert group is not None
        here = group.arrived.setdefault((self._evaluation * 1000 + step, what), set())
        here.add(self._rank)
        for member in group.members.values():
            self._scheduler.notify(member.process_state)
        self._wait(lambda: len(here) == group.size)

    def _compute(self, seconds: float) -> None:
        scheduler = self._scheduler
        if math.isfinite(seconds):
            seconds = scheduler.rng.expovariate(1 / seconds)
        until = scheduler.time + seconds
        scheduler.wait(lambda: scheduler.time >= until or self._is_interrupted, seconds)
        if self._is_interrupted:
            raise CancelledError

    def _wait(self, done: Callable[[], bool]) -> None:
        group = self._group
        assert group is not None
        self._scheduler.wait(
            lambda: done() or self._is_interrupted or group.is_broken(), group.timeout
        )
        if self._is_interrupted:
            raise CancelledError
        if not done() and not group.is_broken():
            raise TimedOutError
        if not done():
            raise PeerLostError

    @property
    def _is_interrupted(self) -> bool:
        return self._is_interruptible and self._interrupts > 0

    def _describe(self, error: Exception) -> ObjectiveEnd:
        return ObjectiveEnd(
            failure=type(error).__name__,
            is_cancelled=isinstance(error, CancelledError),
            echo=isinstance(error, PeerLostError),
            gave_up=isinstance(error, TimedOutError),
            seconds=self._group.timeout
            if isinstance(error, TimedOutError) and self._group
            else 0.0,
            at=self._scheduler.time,
        )

    def _die(self) -> None:
        self._exit(-signal.SIGSEGV)
        self._scheduler.end_process()

    def _put(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        self._outbox.append(Message(kind, content, tuple(descriptors)))
        self._scheduler.notify(self.owner)


def _has_event(watched: Any) -> bool:
    return bool(select.select([watched], [], [], 0)[0])


def _write_draft() -> int:
    descriptor = os.memfd_create("draft")
    os.write(descriptor, _DRAFT)
    return descriptor


class Slot:
    """Holds the trainer of a rank, like `hpo.evaluation.trainer_client.TrainerSlot`."""

    def __init__(self, site: Site, owner: Process) -> None:
        self._site = site
        self._owner = owner
        self._trainer: Trainer | None = None
        self.output = TrainerOutput()
        self.group_name = ""
        self.first_free_memory = 0

    def find_member(self, group_name: str) -> Trainer | None:
        """Return the trainer, if it is in this group."""
        return self._trainer if self.group_name == group_name != "" and self._is_running() else None

    def provide_trainer(self, _: Mapping[str, str]) -> Trainer:
        """Return the running trainer, or a new one."""
        if not self._is_running():
            self.discard_trainer()
            self._trainer = Trainer(self._site, self._owner)
        assert self._trainer is not None
        return self._trainer

    def _is_running(self) -> bool:
        return self._trainer is not None and self._trainer.process_state.is_alive

    def finish_evaluation(self, is_clean: bool) -> None:
        """Close the trainer, unless it is clean."""
        if not is_clean:
            self._close()

    def discard_trainer(self) -> None:
        """Kill the trainer, if there is one."""
        if self._trainer is not None:
            self._trainer.kill()
        self._close()

    def end_trainer(self) -> None:
        """Kill the trainer, if there is one."""
        self.discard_trainer()

    def warn_once(self, _: str) -> None:
        """Print nothing."""

    def _close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        self.group_name = ""
